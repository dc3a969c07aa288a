"""An index directory, opened: its parts checked against its manifest, searched for passages.

This is where rows become passages. How rows are found and how an index is built is its backend's
(``forage.retrieval.index.backends`` lists them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

from forage.data.corpus import CorpusStore
from forage.errors import UserError
from forage.retrieval.backend import Backend, OpenOptions
from forage.retrieval.index.backends import AnyManifest, open_backend, read_manifest
from forage.retrieval.index.manifest import check_corpus, require_same
from forage.retrieval.words.bm25_index import build_index
from forage.types import Hit

__all__ = ["Index", "OpenOptions", "build_index", "open_corpus", "open_index"]


@dataclass(frozen=True, slots=True)
class Index:
    """An opened index: searches give passages."""

    manifest: AnyManifest
    store: CorpusStore
    backend: Backend

    def __len__(self) -> int:
        return len(self.store)

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def id(self) -> str:
        return f"{self.name}-{sha256(self.manifest.model_dump_json().encode()).hexdigest()[:16]}"

    @property
    def num_passages(self) -> int:
        return len(self.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query at most ``topk`` hits, best first (BM25: none where no word is known)."""
        if topk < 1:
            raise UserError(f"topk is {topk}; it must be 1 or more")
        rows = self.backend.search(queries, topk)
        return [[Hit(self.store.passage(s.row), s.score) for s in found] for found in rows]

    def close(self) -> None:
        """Let the mapped corpus go, and what the backend holds."""
        self.store.close()
        self.backend.close()


def open_index(directory: Path, options: OpenOptions | None = None) -> Index:
    """Open an index and check that its parts belong together; raises ``UserError``."""
    manifest = read_manifest(directory)
    store = open_corpus(directory)
    try:
        backend = open_backend(directory, manifest, store, options or OpenOptions())
    except BaseException:
        store.close()
        raise
    index = Index(manifest, store, backend)
    try:
        require_same(
            directory, "passages", manifest.num_passages, "its backend holds", len(backend)
        )
    except UserError:
        index.close()
        raise
    return index


def open_corpus(directory: Path) -> CorpusStore:
    """The passages of an index alone, whatever searches them; raises ``UserError``."""
    manifest = read_manifest(directory)
    store = CorpusStore(directory)
    try:
        check_corpus(directory, manifest, len(store))
    except UserError:
        store.close()
        raise
    return store

"""An index directory: built from a corpus file, checked when opened, searched for passages.

The directory is self-contained (a plain copy of the corpus, its offsets, the backend's files, a
manifest) and appears whole or not at all: it is built beside its place and renamed into it. This
is where rows become passages; how rows are found is the backend's, and HTTP is the server's.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Self

from psutil import pid_exists
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from forage.data.corpus import LINES_FILE, CorpusStore, StoredCorpus, build_store, format_contents
from forage.errors import UserError
from forage.retrieval.backend import Backend
from forage.retrieval.bm25 import BM25, TOKENIZER, BM25Builder
from forage.types import Hit, Passage

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"

# Hashing a corpus at each opening costs a second a gigabyte: above this its size alone is compared.
_MAX_HASHED_BYTES = 256 * 2**20


class Manifest(BaseModel):
    """What an index is made of, written when it is built and checked when it is opened."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    backend: Literal["bm25"]
    k1: float
    b: float
    tokenizer: str
    num_passages: int = Field(ge=1)
    corpus_bytes: int = Field(ge=1)
    corpus_sha256: str
    library: str


@dataclass(frozen=True, slots=True)
class Index:
    """An opened index: searches give passages."""

    manifest: Manifest
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
        """For each query at most ``topk`` hits, best first (none where no word is known)."""
        if topk < 1:
            raise UserError(f"topk is {topk}; it must be 1 or more")
        rows = self.backend.search(queries, topk)
        return [[Hit(self.store.passage(s.row), s.score) for s in found] for found in rows]

    def close(self) -> None:
        """Let the mapped corpus go."""
        self.store.close()


def build_index(
    corpus: Path,
    out: Path,
    backend: str = "bm25",
    k1: float = 0.9,
    b: float = 0.4,
    show_progress: bool = True,
) -> Manifest:
    """Build an index of ``corpus`` in ``out`` (an older index there is replaced).

    k1 0.9 and b 0.4 are those of the published BM25 runs (Pyserini's). Raises ``UserError`` for a
    wrong corpus line, an unknown backend, or an ``out`` that holds something else.
    """
    if backend != "bm25":
        raise UserError(f"unknown backend {backend!r}; available: bm25")
    out = out.absolute()
    _refuse_other_contents(out)
    builder = BM25Builder(k1, b)
    with _built_beside(out) as directory:
        with _progress(show_progress) as progress:
            reading = progress.add_task(f"reading {corpus.name}", total=None)

            def add(passage: Passage) -> None:
                builder.add(format_contents(passage))
                progress.advance(reading)

            stored = build_store(corpus, directory, add)
            progress.update(reading, total=stored.num_passages)
            scoring = progress.add_task("scoring terms", total=None)
            builder.write(directory)
            progress.update(scoring, total=1, completed=1)
        manifest = _manifest(stored, k1, b)
        path = directory / MANIFEST_FILE
        path.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    logger.info("indexed %d passages of %s in %s", manifest.num_passages, corpus, out)
    return manifest


def open_index(directory: Path) -> Index:
    """Open an index and check that its parts belong together; raises ``UserError``."""
    manifest = _read_manifest(directory)
    store = CorpusStore(directory)
    backend = BM25(directory)
    try:
        _check_parts(directory, manifest, store, backend)
    except UserError:
        store.close()
        raise
    return Index(manifest, store, backend)


def _manifest(stored: StoredCorpus, k1: float, b: float) -> Manifest:
    return Manifest(
        backend="bm25",
        k1=k1,
        b=b,
        tokenizer=TOKENIZER,
        num_passages=stored.num_passages,
        corpus_bytes=stored.num_bytes,
        corpus_sha256=stored.sha256,
        library=f"bm25s {version('bm25s')}",
    )


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} is not an index (it has no {MANIFEST_FILE}); make one with "
            f"`forage index --corpus FILE --out {directory}`"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"]) or "the file"
        raise UserError(f"{path}: {where}: {wrong['msg']}; build the index again") from error


def _check_parts(directory: Path, manifest: Manifest, store: CorpusStore, backend: BM25) -> None:
    """Compare the manifest with what lies beside it; raises ``UserError`` naming both sides."""
    _check(
        directory, "format version", manifest.format_version, "this Forage reads", FORMAT_VERSION
    )
    _check(directory, "tokenizer", manifest.tokenizer, "this Forage has", TOKENIZER)
    _check(directory, "passages", manifest.num_passages, "its corpus holds", len(store))
    _check(directory, "passages", manifest.num_passages, "its backend holds", len(backend))
    corpus = directory / LINES_FILE
    num_bytes = corpus.stat().st_size
    _check(directory, "corpus bytes", manifest.corpus_bytes, "its corpus has", num_bytes)
    if num_bytes <= _MAX_HASHED_BYTES:
        with corpus.open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
        _check(directory, "corpus sha256", manifest.corpus_sha256, "its corpus has", found)


def _check(directory: Path, what: str, stated: object, other_side: str, found: object) -> None:
    if stated != found:
        raise UserError(
            f"{directory}: the manifest says {what} {stated}, but {other_side} {found}; "
            "build the index again from its corpus"
        )


def _refuse_other_contents(out: Path) -> None:
    """Only an index, an empty directory or nothing may be built over."""
    if not out.exists() or (out / MANIFEST_FILE).is_file():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise UserError(
            f"{out} exists and is not an index; nothing was touched: choose another --out"
        )


@contextmanager
def _built_beside(out: Path) -> Iterator[Path]:
    """A directory to build in, renamed to ``out`` if the body ends well, else removed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        name = f"{_prefix(out)}{os.getpid()}-"
        directory = Path(tempfile.mkdtemp(prefix=name, dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write beside {out}: {error.strerror}") from error
    try:
        yield directory
        directory.chmod(0o755)
        if out.exists():
            retired = directory.with_name(directory.name + "-retired")
            out.rename(retired)
            directory.rename(out)
            shutil.rmtree(retired)
        else:
            directory.rename(out)
    except OSError as error:
        raise UserError(f"cannot write the index {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _prefix(out: Path) -> str:
    return f".{out.name}.building-"


def _remove_leftovers(out: Path) -> None:
    """Remove what builds of ``out`` that were killed left beside it."""
    for left in list(out.parent.iterdir()):
        owner = left.name.removeprefix(_prefix(out)).split("-")[0]
        if left.name.startswith(_prefix(out)) and owner.isdigit() and not pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _progress(is_shown: bool) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not is_shown,
    )

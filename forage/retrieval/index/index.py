"""An index directory, opened: its parts checked against its manifest, searched for passages.

This is where rows become passages; how rows are found is the backend's, how an index is built is
``forage.retrieval.index.build``'s, and HTTP is the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Self

import numpy as np

from forage.data.corpus import CorpusStore
from forage.errors import UserError
from forage.retrieval.backend import Backend
from forage.retrieval.index.build import (
    FAISS_FILE,
    PROBES_FILE,
    VECTORS_DIR,
    build_index,
    probe_texts,
)
from forage.retrieval.index.manifest import (
    AnyManifest,
    BM25Manifest,
    DenseManifest,
    QdrantManifest,
    check_corpus,
    check_vectors_file,
    read_manifest,
    require_same,
)
from forage.retrieval.vectors.encoder import Dtype, Encoder, choice_of
from forage.retrieval.vectors.faiss_settings import rescore_dtype
from forage.retrieval.vectors.precision import closeness
from forage.retrieval.vectors.qdrant import QDRANT_DIR, Qdrant
from forage.retrieval.vectors.qdrant_collection import QdrantCollection
from forage.retrieval.vectors.vector_shards import VectorShards, open_vectors
from forage.retrieval.words.bm25 import BM25, TOKENIZER
from forage.types import Hit

__all__ = ["Index", "OpenOptions", "build_index", "open_corpus", "open_index"]

# Two number formats of one encoder agree to 0.999; another pooling or prefix gives less than this.
_MIN_PROBE_COSINE = 0.98


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How a dense index is served on this machine; None is what the machine does best.

    ``encoder`` is another place of the same model; ``gpus`` hold the vectors, ``device`` the
    encoder.
    """

    device: str | None = None
    dtype: Dtype | None = None
    gpus: tuple[int, ...] = ()
    encoder: str | None = None
    trust_remote_code: bool = False


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
    store = CorpusStore(directory)
    try:
        check_corpus(directory, manifest, len(store))
        if isinstance(manifest, BM25Manifest):
            backend = _open_bm25(directory, manifest)
        elif isinstance(manifest, QdrantManifest):
            backend = _open_qdrant(directory, manifest, store, options or OpenOptions())
        else:
            backend = _open_dense(directory, manifest, store, options or OpenOptions())
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


def _open_bm25(directory: Path, manifest: BM25Manifest) -> Backend:
    require_same(directory, "tokenizer", manifest.tokenizer, "this Forage has", TOKENIZER)
    return BM25(directory)


def _open_dense(
    directory: Path, manifest: DenseManifest, store: CorpusStore, options: OpenOptions
) -> Backend:
    try:
        from forage.retrieval.vectors.dense import DenseBackend
        from forage.retrieval.vectors.faiss_index import open_faiss
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    check_vectors_file(directory, FAISS_FILE, manifest)
    index = open_faiss(directory / FAISS_FILE, manifest.faiss, options.gpus)
    require_same(directory, "passages", manifest.num_passages, "its FAISS file holds", len(index))
    vectors = None
    if rescore_dtype(manifest.faiss) is not None:
        vectors = _open_vectors(directory, manifest)
    encoder = _open_encoder(directory, manifest, options)
    _check_probes(directory, manifest, store, encoder)
    return DenseBackend(encoder, index, manifest.faiss, vectors)


def _open_qdrant(
    directory: Path, manifest: QdrantManifest, store: CorpusStore, options: OpenOptions
) -> Backend:
    if options.gpus:
        raise UserError("--gpus is for FAISS; the vectors of this index are in Qdrant")
    encoder = _open_encoder(directory, manifest, options)
    _check_probes(directory, manifest, store, encoder)
    collection = QdrantCollection(
        directory / QDRANT_DIR if manifest.url is None else manifest.url,
        manifest.collection,
        manifest.encoder.dimension,
        manifest.distance,
        manifest.settings,
    )
    try:
        return Qdrant(collection, encoder)
    except BaseException:
        collection.close()
        raise


def _open_vectors(directory: Path, manifest: DenseManifest) -> VectorShards:
    vectors = open_vectors(directory / VECTORS_DIR)
    layout = vectors.layout
    require_same(directory, "passages", manifest.num_passages, "its vectors are", layout.num_rows)
    stated = rescore_dtype(manifest.faiss)
    require_same(directory, "vectors in", stated, "its vectors are in", layout.dtype)
    dimension = manifest.encoder.dimension
    require_same(directory, "dimension", dimension, "its vectors have", layout.dimension)
    return vectors


def _open_encoder(
    directory: Path, manifest: DenseManifest | QdrantManifest, options: OpenOptions
) -> Encoder:
    """The manifest's encoder, in the numbers that suit this machine."""
    try:
        from forage.retrieval.vectors.sentence_encoder import open_encoder
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    stated = manifest.encoder
    if stated.trust_remote_code and not options.trust_remote_code:
        raise UserError(
            f"{directory}: its encoder {stated.model} runs code of its own; "
            "read it, then serve with --trust-remote-code"
        )
    choice = replace(choice_of(stated), dtype=options.dtype)
    if options.encoder is not None:
        field = "model" if stated.query_model is None else "query_model"
        choice = replace(choice, **{field: options.encoder, "revision": None})
    encoder = open_encoder(choice, options.device, is_for_queries_only=True)
    for name in ("fingerprint", "query_fingerprint", "pooling", "dimension", "max_length"):
        require_same(
            directory,
            f"encoder {name}",
            getattr(stated, name),
            f"{encoder.spec.query_model or encoder.spec.model} has",
            getattr(encoder.spec, name),
        )
    return encoder


def _check_probes(
    directory: Path, manifest: DenseManifest | QdrantManifest, store: CorpusStore, encoder: Encoder
) -> None:
    """Compare the encoder's vectors of a few texts with those from when the index was built."""
    path = directory / PROBES_FILE
    try:
        kept = np.load(path)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); build the index again") from error
    found = encoder.encode_queries(probe_texts(store))
    cosine = closeness(kept, found) if kept.shape == found.shape else 0.0
    if not cosine >= _MIN_PROBE_COSINE:  # NaN too
        raise UserError(
            f"{directory}: built with {manifest.encoder.model} in {manifest.encoder.dtype} and "
            f"{manifest.library}, but the encoder here gives other vectors for the same texts "
            f"(lowest cosine {cosine:.3f}); check the model's files and the versions"
        )


def missing_extra(error: ModuleNotFoundError) -> UserError:
    """The error for a machine without the packages of dense indexes; our own bugs pass through."""
    if error.name is None or error.name.partition(".")[0] == "forage":
        raise error
    return UserError(
        f"a dense index needs the package {error.name}; run: pip install 'forage[dense]'"
    )

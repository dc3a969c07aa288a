"""Builds an index directory from a corpus file: of words (BM25) or of vectors.

The directory is self-contained (a plain copy of the corpus, its offsets, the backend's files, a
manifest) and appears whole or not at all. A build of vectors takes hours on large corpora: its
finished shards outlast a kill, and the same command goes on with those that are missing. Opening
and searching are ``forage.retrieval.index.index``'s.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import cast

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from forage.data.corpus import CorpusStore, StoredCorpus, build_store, format_contents
from forage.errors import UserError
from forage.retrieval.index.atomic_directory import (
    built_beside,
    refuse_other_contents,
    resumable_beside,
)
from forage.retrieval.index.build_progress import metered
from forage.retrieval.index.manifest import (
    BM25Manifest,
    DenseManifest,
    common_fields,
    hash_file,
    write_manifest,
)
from forage.retrieval.vectors.encoder import (
    Encoder,
    EncoderChoice,
    EncoderSpec,
    choice_of,
    require_finite,
)
from forage.retrieval.vectors.encoding import encode_corpus
from forage.retrieval.vectors.faiss_settings import (
    AdoptedSettings,
    FaissSettings,
    FlatSettings,
    fit_to,
    rescore_dtype,
    stored_dtype,
)
from forage.retrieval.vectors.vector_shards import ShardLayout, VectorShards, create_vectors
from forage.retrieval.words.bm25 import TOKENIZER, BM25Builder
from forage.types import Passage

logger = logging.getLogger(__name__)

FAISS_FILE = "vectors.faiss"
VECTORS_DIR = "vectors"
PROBES_FILE = "probes.npy"
NUM_PROBES = 4

_STATE_FILE = "state.json"
_PROBE_CHARS = 300


@dataclass(frozen=True, slots=True)
class DenseBuild:
    """How to build an index of vectors; ``devices`` () is the first GPU, or the CPU."""

    encoder: EncoderChoice
    faiss: FaissSettings = field(default_factory=FlatSettings)
    devices: tuple[str, ...] = ()
    rows_per_shard: int = 16_384
    is_restart: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """A corpus and its vectors on disk, in the directory of an unfinished build."""

    directory: Path
    stored: StoredCorpus
    spec: EncoderSpec
    faiss: FaissSettings
    vectors: VectorShards


class _Source(BaseModel):
    """The corpus file, as far as a look at it tells; None where it is no plain file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    num_bytes: int
    mtime_ns: int


class _State(BaseModel):
    """What an unfinished build has decided: whatever its finished shards depend on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: _Source | None
    num_passages: int
    num_bytes: int
    sha256: str
    encoder: EncoderSpec


def build_index(
    corpus: Path,
    out: Path,
    backend: str = "bm25",
    k1: float = 0.9,
    b: float = 0.4,
    show_progress: bool = True,
) -> BM25Manifest:
    """Build a BM25 index of ``corpus`` in ``out`` (an older index there is replaced).

    k1 0.9 and b 0.4 are those of the published BM25 runs (Pyserini's). Raises ``UserError`` for a
    wrong corpus line, another backend, or an ``out`` that holds something else.
    """
    if backend != "bm25":
        raise UserError(
            f"unknown backend {backend!r}; available: bm25 (vectors: build_dense_index)"
        )
    out = out.absolute()
    refuse_other_contents(out)
    builder = BM25Builder(k1, b)
    with built_beside(out) as directory:
        with metered(f"reading {corpus.name}", None, show_progress) as advance:

            def add(passage: Passage) -> None:
                builder.add(format_contents(passage))
                advance(1)

            stored = build_store(corpus, directory, add)
        with metered("scoring terms", None, show_progress):
            builder.write(directory)
        manifest = BM25Manifest.model_validate(
            common_fields(stored)
            | {"k1": k1, "b": b, "tokenizer": TOKENIZER, "library": f"bm25s {version('bm25s')}"}
        )
        write_manifest(directory, manifest)
    logger.info("indexed %d passages of %s in %s", manifest.num_passages, corpus, out)
    return manifest


def build_dense_index(
    corpus: Path, out: Path, settings: DenseBuild, show_progress: bool = True
) -> DenseManifest:
    """Build an index of vectors of ``corpus`` in ``out``, or go on with one that was cut short.

    Raises ``UserError`` as ``encoded_corpus`` does.
    """
    assert not isinstance(settings.faiss, AdoptedSettings), "an adopted index is not built"
    with encoded_corpus(corpus, out, settings, show_progress) as encoded:
        manifest = _index_vectors(encoded, show_progress)
        write_manifest(encoded.directory, manifest)
    logger.info("indexed %d passages of %s in %s", manifest.num_passages, corpus, out)
    return manifest


@contextmanager
def encoded_corpus(
    corpus: Path, out: Path, settings: DenseBuild, show_progress: bool
) -> Iterator[Encoded]:
    """The corpus and its vectors, to be made an index of in the body; it then lies at ``out``.

    Raises ``UserError`` for a wrong corpus line, an encoder or settings that do not fit, vectors
    with NaN (naming the passages), an ``out`` that holds something else, or an unfinished build
    of other settings.
    """
    out = out.absolute()
    refuse_other_contents(out)
    with resumable_beside(out, settings.is_restart) as directory:
        state = _read_state(directory)
        try:
            encoders = _open_encoders(settings, state)
            stored = _store_corpus(corpus, directory, encoders[0].spec, state, show_progress)
        except UserError:
            if state is None:  # nothing of worth was made yet
                shutil.rmtree(directory)
            raise
        faiss_settings = fit_to(settings.faiss, stored.num_passages, encoders[0].dimension)
        with CorpusStore(directory) as store:
            vectors = _encode(store, directory, encoders, faiss_settings, settings, show_progress)
            write_probes(store, encoders[0], directory)
        yield Encoded(directory, stored, encoders[0].spec, faiss_settings, vectors)
        (directory / _STATE_FILE).unlink()


def _open_encoders(settings: DenseBuild, state: _State | None) -> list[Encoder]:
    """One encoder a device, all of one spec; an unfinished build's numbers are kept."""
    from forage.retrieval.vectors.sentence_encoder import open_encoder, with_dtype_of

    if len(set(settings.devices)) < len(settings.devices):
        raise UserError(f"--device names one twice: {', '.join(settings.devices)}")
    choice = settings.encoder
    if state is not None:
        choice = with_dtype_of(choice, state.encoder)
    first, *others = settings.devices or (None,)
    encoders = [open_encoder(choice, first)]
    for device in others:
        encoders.append(open_encoder(choice_of(encoders[0].spec), device))
    return cast(list[Encoder], encoders)


def _store_corpus(
    corpus: Path, directory: Path, spec: EncoderSpec, state: _State | None, show_progress: bool
) -> StoredCorpus:
    """The plain copy of the corpus, and the state of the build over it."""
    source = _look_at(corpus)
    if state is not None:
        _require_same_encoder(directory, state.encoder, spec)
        if source is not None and source == state.source:
            logger.info("going on with the unfinished build in %s", directory)
            return StoredCorpus(state.num_passages, state.num_bytes, state.sha256)
    with metered(f"reading {corpus.name}", None, show_progress) as advance:
        stored = build_store(corpus, directory, lambda _: advance(1))
    if state is not None and stored.sha256 != state.sha256:
        raise UserError(
            f"{directory} holds an unfinished build of another corpus than {corpus}; "
            "give --restart to begin anew"
        )
    state = _State(
        source=source,
        num_passages=stored.num_passages,
        num_bytes=stored.num_bytes,
        sha256=stored.sha256,
        encoder=spec,
    )
    written = directory / f"{_STATE_FILE}.tmp"
    written.write_text(state.model_dump_json(), encoding="utf-8")
    written.rename(directory / _STATE_FILE)
    return stored


def _require_same_encoder(directory: Path, before: EncoderSpec, now: EncoderSpec) -> None:
    old, new = before.model_dump(), now.model_dump()
    differing = [name for name in old if old[name] != new[name]]
    if differing:
        name = differing[0]
        raise UserError(
            f"{directory} holds an unfinished build whose encoder has {name} {old[name]!r}, this "
            f"one has {new[name]!r}; finish it with the same settings, or give --restart"
        )


def _look_at(corpus: Path) -> _Source | None:
    if not corpus.is_file():
        return None
    found = corpus.stat()
    return _Source(path=str(corpus.absolute()), num_bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def _read_state(directory: Path) -> _State | None:
    path = directory / _STATE_FILE
    if not path.exists():
        return None
    try:
        return _State.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise UserError(
            f"{path} is of another version of Forage; give --restart to begin anew"
        ) from error


def _encode(
    store: CorpusStore,
    directory: Path,
    encoders: list[Encoder],
    faiss_settings: FaissSettings,
    settings: DenseBuild,
    show_progress: bool,
) -> VectorShards:
    """The vectors of the corpus on disk; those that an earlier try finished are kept."""
    layout = ShardLayout(
        num_rows=len(store),
        dimension=encoders[0].dimension,
        dtype=stored_dtype(faiss_settings),
        rows_per_shard=settings.rows_per_shard,
    )
    vectors = create_vectors(directory / VECTORS_DIR, layout)
    damaged = vectors.drop_damaged()
    if damaged:
        logger.warning("%d damaged shards of vectors are made again", len(damaged))
    missing = vectors.missing()
    done = layout.num_rows - sum(len(layout.rows(shard)) for shard in missing)
    if done:
        logger.info("%d of %d passages are encoded already", done, layout.num_rows)
    with metered("encoding passages", layout.num_rows, show_progress, done) as advance:
        encode_corpus(store, vectors, encoders, advance)
    return vectors


def _index_vectors(encoded: Encoded, show_progress: bool) -> DenseManifest:
    """Build the FAISS file; vectors that nothing scores from again are removed."""
    from forage.retrieval.vectors.faiss_index import build_faiss

    path = encoded.directory / FAISS_FILE
    label = f"building {encoded.faiss.kind}"
    with metered(label, encoded.stored.num_passages, show_progress) as advance:
        build_faiss(encoded.vectors, encoded.faiss, path, advance)
    if rescore_dtype(encoded.faiss) is None:
        shutil.rmtree(encoded.vectors.directory)
    return DenseManifest.model_validate(
        common_fields(encoded.stored)
        | {
            "backend": encoded.faiss.kind,
            "encoder": encoded.spec,
            "faiss": encoded.faiss,
            "index_bytes": path.stat().st_size,
            "index_sha256": hash_file(path),
            "library": dense_versions(),
        }
    )


def dense_versions() -> str:
    """The packages that a dense index depends on."""
    from forage.retrieval.vectors.faiss_index import faiss_version

    return (
        f"faiss {faiss_version()}, sentence-transformers {version('sentence-transformers')}, "
        f"torch {version('torch')}"
    )


def probe_texts(store: CorpusStore) -> list[str]:
    """The beginnings of a few passages, spread over the corpus, as queries."""
    rows = np.linspace(0, len(store) - 1, NUM_PROBES).astype(int).tolist()
    return [store.passage(row).text[:_PROBE_CHARS] for row in rows]


def write_probes(store: CorpusStore, encoder: Encoder, directory: Path) -> None:
    """Keep the vectors of ``probe_texts``: an encoder that serves the index has to give them."""
    texts = probe_texts(store)
    vectors = encoder.encode_queries(texts)
    require_finite(vectors, texts, encoder.spec)
    np.save(directory / PROBES_FILE, vectors)

"""An index whose vectors are in Qdrant: its manifest, how it is built and opened, and its search.

Encoding and the store of passages are those of every index of vectors; here the vectors go from
disk into a collection, and the manifest says where that is. Cut short, the same command goes on:
with the passages not yet encoded, then with the points not yet stored. The client and its two modes
are ``forage.retrieval.vectors.qdrant_collection``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from pydantic import Field

from forage.data.corpus_store import CorpusStore
from forage.errors import UserError
from forage.retrieval.backend import Backend, OpenOptions, Scored
from forage.retrieval.source import SourceError
from forage.retrieval.store.build_progress import build_progress
from forage.retrieval.store.manifest import CommonManifest, common_fields, write_manifest
from forage.retrieval.vectors.encoded_corpus import DenseBuild, Encoded, encoded_corpus
from forage.retrieval.vectors.encoder import EncoderSpec
from forage.retrieval.vectors.probes import open_same_encoder
from forage.retrieval.vectors.qdrant_collection import (
    Distance,
    QdrantCollection,
    QdrantSettings,
    require_qdrant,
)

logger = logging.getLogger(__name__)

QDRANT_DIR = "qdrant"


class QdrantManifest(CommonManifest):
    """An index of vectors in a Qdrant collection.

    ``url`` is the server's, None for the embedded mode (the collection then lies in the index
    directory, and there are no ``settings``).
    """

    backend: Literal["qdrant"] = "qdrant"
    encoder: EncoderSpec
    collection: str
    distance: Distance
    url: str | None
    settings: QdrantSettings | None


class QdrantOptions(QdrantSettings):
    """What ``forage index --backend qdrant`` takes: where the collection is, and its settings."""

    qdrant_url: str | None = Field(
        default=None, description="URL of a server's gRPC port; without it, the embedded mode"
    )
    collection: str = Field(
        default="forage", description="what the collection's name on the server begins with"
    )

    def on_server(self) -> QdrantSettings | None:
        """A server's settings, None without one; raises ``UserError`` for those that do nothing."""
        if self.qdrant_url is not None:
            return QdrantSettings(**self.model_dump(exclude={"qdrant_url", "collection"}))
        for name in self.model_fields_set - {"qdrant_url"}:
            raise UserError(
                f"--{name.replace('_', '-')} has no effect here: Qdrant's embedded mode compares "
                "with every vector; give --qdrant-url"
            )
        return None


def build_qdrant_index(
    corpus: Path, out: Path, build: DenseBuild, options: QdrantOptions, show_progress: bool = True
) -> QdrantManifest:
    """Build the index, or go on with one that was cut short; raises ``UserError``.

    ``build.faiss`` decides in which numbers the vectors wait on disk.
    """
    settings = options.on_server()
    require_qdrant(options.qdrant_url)
    with encoded_corpus(corpus, out, build, show_progress) as encoded:
        manifest = _manifest(encoded, options, settings)
        num_rows, gather = encoded.stored.num_passages, encoded.vectors.gather
        with (
            closing(_collection(encoded.directory, manifest)) as collection,
            build_progress("storing vectors in Qdrant", num_rows, show_progress) as advance,
        ):
            build_qdrant(
                *(collection, num_rows, lambda start, stop: gather(np.arange(start, stop))),
                on_rows=advance,
            )
        write_manifest(encoded.directory, manifest)
    logger.info("indexed %d passages in %s", manifest.num_passages, out)
    return manifest


def open_qdrant(
    directory: Path, manifest: QdrantManifest, store: CorpusStore, options: OpenOptions
) -> Backend:
    """The backend of an index directory; raises ``UserError``."""
    if options.gpus:
        raise UserError("--gpus is for FAISS; the vectors of this index are in Qdrant")
    encoder = open_same_encoder(directory, manifest.encoder, manifest.library, store, options)
    collection = _collection(directory, manifest)
    try:
        return Qdrant(collection, encoder)
    except BaseException:
        collection.close()
        raise


class EncodeQueries(Protocol):
    """What searching needs of an encoder."""

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [B, D]; B may be 0."""
        ...


class Qdrant:
    """A backend: queries become vectors, the collection gives rows."""

    name = "qdrant"

    def __init__(self, collection: QdrantCollection, encoder: EncodeQueries) -> None:
        """Raises ``UserError`` where the collection is missing or holds other vectors."""
        collection.check()
        self._collection, self._encoder = collection, encoder
        self._num_rows = collection.count()

    def __len__(self) -> int:
        return self._num_rows

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]:
        """At most ``topk`` rows for each query; raises ``SourceError``."""
        if not queries:
            return []
        vectors_BD = self._encoder.encode_queries(queries)
        if not np.isfinite(vectors_BD).all():
            raise SourceError("the encoder gave a vector that is not a number", is_temporary=False)
        return self._collection.search(vectors_BD, topk)

    def close(self) -> None:
        self._collection.close()


def build_qdrant(
    collection: QdrantCollection,
    num_rows: int,
    vectors: Callable[[int, int], np.ndarray],
    batch_size: int = 256,
    on_rows: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill the collection with ``vectors(start, stop)`` (float32 [B, D]) for all rows, in batches.

    Batches that are there already are not asked for: an encoder is spared what an earlier,
    interrupted build has stored. ``on_rows`` is called with the rows done by each batch. Raises
    ``UserError`` where the server stays away or the points do not add up.
    """
    has_begun = collection.create_or_resume() > 0
    for start in range(0, num_rows, batch_size):
        stop = min(start + batch_size, num_rows)
        if not (has_begun and collection.has_rows(start, stop)):
            collection.add(start, vectors(start, stop))
        on_rows(stop - start)
    collection.finish(num_rows)


def _collection(directory: Path, manifest: QdrantManifest) -> QdrantCollection:
    return QdrantCollection(
        directory / QDRANT_DIR if manifest.url is None else manifest.url,
        manifest.collection,
        manifest.encoder.dimension,
        manifest.distance,
        manifest.settings,
    )


def _manifest(
    encoded: Encoded, options: QdrantOptions, settings: QdrantSettings | None
) -> QdrantManifest:
    name = options.collection
    if settings is not None:
        # A digest of what it is made of, so that another build never meets its points. hnsw_ef is
        # how a search looks, not what it finds: it may change without a new collection.
        graph = settings.model_dump_json(exclude={"hnsw_ef"})
        made_of = "\n".join([encoded.stored.sha256, encoded.spec.model_dump_json(), graph])
        name = f"{name}-{sha256(made_of.encode()).hexdigest()[:12]}"
    packages = ("qdrant-client", "sentence-transformers", "torch")
    return QdrantManifest.model_validate(
        common_fields(encoded.stored)
        | {
            "encoder": encoded.spec,
            "collection": name,
            # Unit vectors: the cosine is the inner product. Others were trained for the latter.
            "distance": "cosine" if encoded.spec.normalise else "dot",
            "url": options.qdrant_url,
            "settings": settings,
            "library": ", ".join(f"{package} {version(package)}" for package in packages),
        }
    )

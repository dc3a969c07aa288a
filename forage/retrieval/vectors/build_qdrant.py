"""Builds an index whose vectors are in Qdrant: ``forage index --backend qdrant``.

Encoding and the store of passages are those of every index of vectors
(``forage.retrieval.index.build``); here the vectors go from disk into a collection, and the
manifest says where that is. Cut short, the same command goes on: with the passages not yet encoded,
then with the points not yet stored.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import numpy as np

from forage.retrieval.index.build import DenseBuild, Encoded, encoded_corpus
from forage.retrieval.index.build_progress import metered
from forage.retrieval.index.manifest import QdrantManifest, common_fields, write_manifest
from forage.retrieval.vectors.qdrant import QDRANT_DIR, build_qdrant
from forage.retrieval.vectors.qdrant_collection import QdrantCollection, require_qdrant
from forage.retrieval.vectors.qdrant_settings import QdrantSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QdrantPlace:
    """Where the collection is to be: ``url`` None is the embedded mode, without ``settings``.

    On a server it is named ``name`` and a digest of what it is made of, so that another build
    never meets its points.
    """

    url: str | None = None
    name: str = "forage"
    settings: QdrantSettings | None = None


def build_qdrant_index(
    corpus: Path, out: Path, build: DenseBuild, place: QdrantPlace, show_progress: bool = True
) -> QdrantManifest:
    """Build the index, or go on with one that was cut short; raises ``UserError``.

    ``build.faiss`` decides in which numbers the vectors wait on disk.
    """
    require_qdrant(place.url)
    with encoded_corpus(corpus, out, build, show_progress) as encoded:
        manifest = _manifest(encoded, place)
        collection = QdrantCollection(
            encoded.directory / QDRANT_DIR if place.url is None else place.url,
            manifest.collection,
            manifest.encoder.dimension,
            manifest.distance,
            place.settings,
        )
        try:
            _store_vectors(encoded, collection, show_progress)
        finally:
            collection.close()
        shutil.rmtree(encoded.vectors.directory)
        write_manifest(encoded.directory, manifest)
    logger.info("indexed %d passages of %s in %s", manifest.num_passages, corpus, out)
    return manifest


def _store_vectors(encoded: Encoded, collection: QdrantCollection, show_progress: bool) -> None:
    num_rows = encoded.stored.num_passages
    with metered("storing vectors in Qdrant", num_rows, show_progress) as advance:
        build_qdrant(
            collection,
            num_rows,
            lambda start, stop: encoded.vectors.gather(np.arange(start, stop)),
            on_rows=advance,
        )


def _manifest(encoded: Encoded, place: QdrantPlace) -> QdrantManifest:
    settings = place.settings
    if place.url is not None and settings is None:
        settings = QdrantSettings()
    return QdrantManifest.model_validate(
        common_fields(encoded.stored)
        | {
            "encoder": encoded.spec,
            "collection": _collection_name(encoded, place, settings),
            # Unit vectors: the cosine is the inner product. Others were trained for the latter.
            "distance": "cosine" if encoded.spec.normalise else "dot",
            "url": place.url,
            "settings": settings,
            "library": _versions(),
        }
    )


def _collection_name(encoded: Encoded, place: QdrantPlace, settings: QdrantSettings | None) -> str:
    if settings is None:
        return place.name
    # hnsw_ef is how a search looks, not what it finds: it may change without a new collection.
    graph = settings.model_dump_json(exclude={"hnsw_ef"})
    made_of = "\n".join([encoded.stored.sha256, encoded.spec.model_dump_json(), graph])
    return f"{place.name}-{sha256(made_of.encode()).hexdigest()[:12]}"


def _versions() -> str:
    names = ("qdrant-client", "sentence-transformers", "torch")
    return ", ".join(f"{name} {version(name)}" for name in names)

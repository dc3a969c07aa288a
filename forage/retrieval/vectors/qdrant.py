"""Dense search by Qdrant: an encoder in front of a collection, and how the collection is filled.

Building can be broken off and gone on with: what the collection holds is neither encoded nor sent
again. The client, its two modes and its settings are
``forage.retrieval.vectors.qdrant_collection``'s; which encoder an index needs is its manifest's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from forage.retrieval.backend import Scored
from forage.retrieval.source import SourceError
from forage.retrieval.vectors.qdrant_collection import QdrantCollection

QDRANT_DIR = "qdrant"


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
    interrupted build has stored. ``on_rows`` is told how many rows have been dealt with. Raises
    ``UserError`` where the server stays away or the points do not add up.
    """
    has_begun = collection.create_or_resume() > 0
    for start in range(0, num_rows, batch_size):
        stop = min(start + batch_size, num_rows)
        if not (has_begun and collection.has_rows(start, stop)):
            collection.add(start, vectors(start, stop))
        on_rows(stop - start)
    collection.finish(num_rows)

"""Dense search: an encoder, a FAISS index, and for compressed ones an exact second look.

A backend as ``forage.retrieval.backend`` has it: queries in, rows and scores out. All queries of a
call are encoded in one go. Building is ``forage.retrieval.index.build``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forage.errors import UserError
from forage.retrieval.backend import Scored
from forage.retrieval.source import SourceError
from forage.retrieval.vectors.encoder import Encoder, bad_rows
from forage.retrieval.vectors.faiss_index import FaissIndex
from forage.retrieval.vectors.faiss_settings import FaissSettings, num_candidates
from forage.retrieval.vectors.vector_shards import VectorShards

# Candidates of this many queries are gathered at once: 64 x 200 x 768 floats are 40 MB.
_RESCORED_QUERIES = 64


class DenseBackend:
    """Rows by the inner product of vectors.

    For an approximate index the contract's "first k of a search for more" holds up to its number
    of candidates (``num_candidates``); beyond it a larger search finds the same or better.
    """

    def __init__(
        self,
        encoder: Encoder,
        index: FaissIndex,
        settings: FaissSettings,
        vectors: VectorShards | None = None,
    ) -> None:
        """``vectors`` score the candidates again; raises ``UserError`` where parts do not fit."""
        if encoder.dimension != index.dimension:
            raise UserError(
                f"the encoder {encoder.spec.model} gives {encoder.dimension} dimensions, "
                f"but the index has {index.dimension}; they do not belong together"
            )
        self._encoder, self._index = encoder, index
        self._settings, self._vectors = settings, vectors

    @property
    def name(self) -> str:
        return self._settings.kind

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]:
        """For each query at most ``topk`` rows, best first; raises ``SourceError`` on NaN."""
        assert topk >= 1, f"topk is {topk}; it must be 1 or more"
        if not queries:
            return []
        queries_BD = self._encoder.encode_queries(queries)
        wrong = bad_rows(queries_BD)
        if wrong:
            raise SourceError(
                f"the encoder gave NaN or infinity for {len(wrong)} of {len(queries)} queries",
                is_temporary=False,
            )
        scores_BK, rows_BK = self._index.search(queries_BD, num_candidates(self._settings, topk))
        if self._vectors is not None:
            scores_BK = self._scores(queries_BD, rows_BK, self._vectors)
        return [_best(*found, topk) for found in zip(scores_BK, rows_BK, strict=True)]

    def close(self) -> None:
        """The mapped index goes with the last reference to it."""

    def _scores(
        self, queries_BD: np.ndarray, rows_BK: np.ndarray, vectors: VectorShards
    ) -> np.ndarray:
        """The inner products of queries with the kept vectors of their rows, float32 [B, K]."""
        scores_BK = np.empty(rows_BK.shape, dtype=np.float32)
        for start in range(0, len(queries_BD), _RESCORED_QUERIES):
            block = slice(start, start + _RESCORED_QUERIES)
            # A row of -1 (none) reads row 0 and is dropped with its score afterwards.
            rows, places = np.unique(np.maximum(rows_BK[block], 0), return_inverse=True)
            kept = vectors.gather(rows)
            for number, of_query in enumerate(places.reshape(rows_BK[block].shape), start=start):
                scores_BK[number] = kept[of_query] @ queries_BD[number]
        return scores_BK


def _best(scores_K: np.ndarray, rows_K: np.ndarray, topk: int) -> list[Scored]:
    """Best first, ties by the lower row, without FAISS's -1 for "nothing"."""
    found = rows_K >= 0
    scores, rows = scores_K[found], rows_K[found]
    order = np.lexsort((rows, -scores))[:topk]
    pairs = zip(rows[order].tolist(), scores[order].tolist(), strict=True)
    return [Scored(row, score) for row, score in pairs]

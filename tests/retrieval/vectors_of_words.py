"""An encoder without a model: a text's vector is the sum of its words' seeded vectors."""

import zlib
from collections.abc import Sequence

import numpy as np

from forage.retrieval.vectors.encoder import QUOTED_TITLE, EncoderSpec


class WordEncoder:
    """Satisfies ``Encoder``; the same words give the same vector, whatever else is encoded."""

    def __init__(self, dimension: int = 16, nan_for: str | None = None) -> None:
        self._nan_for = nan_for
        self.num_encoded = 0
        self.spec = EncoderSpec(
            model="words",
            revision=None,
            fingerprint="0",
            pooling="own",
            query_prefix="",
            passage_prefix="",
            passage_template=QUOTED_TITLE,
            normalise=True,
            max_length=64,
            dimension=dimension,
            dtype="float32",
        )

    @property
    def dimension(self) -> int:
        return self.spec.dimension

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self.encode_passages(texts)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        self.num_encoded += len(texts)
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                rng = np.random.default_rng(zlib.crc32(word.encode()))
                vectors[row] += rng.standard_normal(self.dimension, dtype=np.float32)
            vectors[row] /= max(float(np.linalg.norm(vectors[row])), 1e-12)
            if self._nan_for is not None and self._nan_for in text:
                vectors[row, 0] = np.nan
        return vectors

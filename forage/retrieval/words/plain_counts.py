"""Counts and scores words with Python and numpy, for installs without numba.

``forage.retrieval.words.word_counts`` uses it instead of its compiled loops. Results are equal bit
for bit; counting takes several times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from forage.retrieval.words.analyzer import Analyzer


def count_terms(
    texts: Sequence[str], analyzer: Analyzer, numbers: dict[str, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns ``lengths_D``, ``ends_D``, ``terms_P`` and ``counts_P`` of a ``WordCounts``."""
    lengths, ends, terms, counts = [], [], [], []
    for text in texts:
        words = analyzer.words(text)
        found = Counter(numbers.setdefault(word, len(numbers)) for word in words)
        terms += found.keys()
        counts += found.values()
        lengths.append(len(words))
        ends.append(len(terms))
    lengths_D, ends_D = np.array(lengths, dtype=np.int32), np.array(ends, dtype=np.int32)
    return lengths_D, ends_D, np.array(terms, dtype=np.int32), np.array(counts, dtype=np.uint32)


def score_pairs(
    ends_D: np.ndarray,
    terms_P: np.ndarray,
    counts_P: np.ndarray,
    first_row: int,
    norms_D: np.ndarray,
    idf_V: np.ndarray,
    heads_V: np.ndarray,
    rows: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Equivalent of ``word_counts.score_pairs``."""
    texts_P = np.repeat(np.arange(len(ends_D)), np.diff(ends_D, prepend=0))
    by_term = np.argsort(terms_P, kind="stable")
    terms, texts = terms_P[by_term], texts_P[by_term]
    nums_V = np.bincount(terms_P, minlength=len(heads_V))
    # A pair's place is its term's next free place, plus the number of earlier pairs of that term.
    earlier = np.arange(len(terms)) - (np.cumsum(nums_V) - nums_V)[terms]
    places = heads_V[terms] + earlier
    tf = counts_P[by_term].astype(np.float64)
    rows[places] = first_row + texts
    scores[places] = idf_V[terms].astype(np.float64) * (tf / (norms_D[texts] + tf))
    heads_V += nums_V

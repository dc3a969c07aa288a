"""Processor time of a BM25 search over a million rows: MaxScore compared with adding every column.

The columns are random, with the sizes that words have in text (from nine in ten passages down to
five passages), and scores by the formula from random counts and lengths. No text is read, so this
takes seconds; ``bm25_engines.py`` measures on passages. Both methods must agree to the bit.

    python benchmarks/bm25_columns.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from forage.retrieval.words.bm25 import Columns

NUM_PASSAGES = (900_000, 500_000, 300_000, 100_000, 30_000, 10_000, 3_000, 1_000, 300, 20, 5)
QUERIES = {
    "two rare words, common ones": (0, 1, 9, 2, 4, 8),
    "one rare word, common ones": (0, 1, 2, 10),
    "words in 3,000 to 30,000 rows, common ones": (0, 1, 2, 4, 5, 6),
    "words in 1,000 to 100,000 rows, one common": (0, 3, 4, 7),
    "a word in 100,000 rows, common ones": (0, 1, 2, 3),
    "common words only": (0, 1, 2),
}
NUM_REPEATS = 9


class Corpus:
    """The columns of eleven words over a million passages, k1 0.9 and b 0.4."""

    def __init__(self, num_rows: int) -> None:
        rng = np.random.default_rng(0)
        length = rng.normal(1, 0.25, num_rows).clip(0.3)
        rows: list[np.ndarray] = []
        scores: list[np.ndarray] = []
        for df in (round(n * num_rows / 1_000_000) or 1 for n in NUM_PASSAGES):
            found = np.sort(rng.choice(num_rows, df, replace=False)).astype(np.int32)
            tf = rng.geometric(0.6, df)
            idf = np.log(1 + (num_rows - df + 0.5) / (df + 0.5))
            score = idf * tf / (tf + 0.9 * (0.6 + 0.4 * length[found]))
            rows.append(found)
            scores.append(score.astype(np.float32))
        self.rows, self.scores, self.num_rows = rows, scores, num_rows
        starts = np.cumsum([0, *map(len, rows)])
        maxima = np.array([score.max() for score in scores])
        self.columns = Columns(
            np.concatenate(rows), np.concatenate(scores), starts, maxima, num_rows
        )

    def add_up(self, terms: Sequence[int], topk: int) -> tuple[np.ndarray, np.ndarray]:
        """Adds up every column, in the order of the query."""
        sums = np.zeros(self.num_rows, dtype=np.float32)
        for term in terms:
            sums[self.rows[term]] += self.scores[term]
        found = np.flatnonzero(sums)
        if topk < len(found):
            values = sums[found]
            found = found[values >= np.partition(values, len(found) - topk)[len(found) - topk]]
        best = found[np.argsort(-sums[found], kind="stable")[:topk]]
        return best, sums[best]


def milliseconds(work: Callable[[], object]) -> float:
    """The median processor time, which other programs affect less than elapsed time."""
    times: list[float] = []
    for _ in range(NUM_REPEATS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    corpus = Corpus(args.rows)
    print("| query | topk | MaxScore | adding up | ratio |\n|---|---|---|---|---|")
    for name, terms in QUERIES.items():
        for topk in (3, 100):
            found, whole = corpus.columns.best(terms, topk), corpus.add_up(terms, topk)
            for ours, theirs in zip(found, whole, strict=True):
                assert np.array_equal(ours, theirs), f"{name}: the two methods differ"
            fast = milliseconds(lambda t=terms, k=topk: corpus.columns.best(t, k))
            slow = milliseconds(lambda t=terms, k=topk: corpus.add_up(t, k))
            print(f"| {name} | {topk} | {fast:.2f} ms | {slow:.2f} ms | {slow / fast:.1f} |")


if __name__ == "__main__":
    main()

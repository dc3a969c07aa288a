"""Collects the words of texts, then writes the index: each term's contribution to every score.

The files equal those of bm25s bit for bit. ``bm25_index`` documents the formula and runs the build;
``forage.retrieval.words.word_counts`` counts the words.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forage.errors import UserError
from forage.retrieval.words import bm25
from forage.retrieval.words.analyzer import Analyzer, AnalyzerSpec
from forage.retrieval.words.languages import AUTO, PLAIN, main_language

if TYPE_CHECKING:
    from forage.retrieval.words.count_processes import LineCounts
    from forage.retrieval.words.word_counts import WordCounts

_BLOCK_CHARS = 2**22
# Number of passages, from the first, that determine the language.
_NUM_CHOOSING = 256

MAX_K1 = 1_000
"""The maximum: at a tenth of it, a score is the number of occurrences, whatever the length."""


class BM25Builder:
    """Collects texts in the order of their rows, then writes the index."""

    def __init__(self, k1: float, b: float, language: str = PLAIN) -> None:
        """``k1``, ``b``: the formula's parameters; raises ``UserError`` if they are out of range.

        For the language ``auto``, texts are held back until there are enough to detect it.
        """
        if not 0 <= k1 <= MAX_K1:
            raise UserError(f"k1 is {k1}; it must be between 0 and {MAX_K1} (0.9 is common)")
        if not 0 <= b <= 1:
            raise UserError(f"b is {b}; it must be between 0 and 1 (0.4 and 0.75 are common)")
        self._k1, self._b = k1, b
        self._analyzer = None if language == AUTO else Analyzer(AnalyzerSpec.of(language))
        self._numbers: dict[str, int] = {}
        # For each process, maps its term numbers to those of the index.
        self._numbers_of: dict[int, array[int]] = defaultdict(partial(array, "i"))
        self._texts: list[str] = []
        self._num_chars = 0
        self._blocks: list[WordCounts] = []
        self._stop_blocks: list[WordCounts] = []  # the stop words of the same texts

    @property
    def analyzer(self) -> AnalyzerSpec:
        """The analyzer of the texts; ``auto`` is resolved now, from the texts so far."""
        return self._chosen().spec

    def add(self, text: str) -> None:
        """Adds the text of the next row."""
        self._texts.append(text)
        self._num_chars += len(text)
        if self._num_chars >= _BLOCK_CHARS and self.is_language_known:
            self._count()

    @property
    def is_language_known(self) -> bool:
        """Whether the language is fixed, or ``auto`` has enough texts to detect it."""
        return self._analyzer is not None or len(self._texts) >= _NUM_CHOOSING

    def add_counts(self, process: int, counted: LineCounts) -> None:
        """Adds the counts of the next rows, with terms numbered by their process."""
        self._count()
        known = self._numbers_of[process]
        known.extend(self._numbers.setdefault(t, len(self._numbers)) for t in counted.new_terms)
        numbers = np.frombuffer(known, dtype=np.int32)
        for counts, blocks in (
            (counted.counts, self._blocks),
            (counted.stop_counts, self._stop_blocks),
        ):
            if counts is not None:
                blocks.append(replace(counts, terms_P=numbers[counts.terms_P]))

    def _chosen(self) -> Analyzer:
        if self._analyzer is None:
            self._analyzer = Analyzer(AnalyzerSpec.of(main_language(self._texts[:_NUM_CHOOSING])))
        return self._analyzer

    def _count(self) -> None:
        """Counts the words of the texts held back."""
        # This import compiles code, which only a build should pay for.
        from forage.retrieval.words.word_counts import count_words

        if self._texts or not self._blocks:
            analyzer = self._chosen()
            self._blocks.append(count_words(self._texts, analyzer, self._numbers))
            if (of_stop_words := analyzer.of_stop_words()) is not None:
                counts = count_words(self._texts, of_stop_words, self._numbers)
                self._stop_blocks.append(counts)
        self._texts, self._num_chars = [], 0

    def write(self, directory: Path) -> None:
        """Scores every term of every text and saves the matrix in ``directory``."""
        from forage.retrieval.words import machine_code, plain_counts, word_counts

        compiled = machine_code.HAS_COMPILER
        score_pairs = word_counts.score_pairs if compiled else plain_counts.score_pairs
        self._count()
        if not self._numbers:
            # No text has a word: a word that occurs nowhere keeps the matrix valid.
            self._numbers[""] = 0
        dfs = np.zeros(len(self._numbers), dtype=np.int64)
        for block in (*self._blocks, *self._stop_blocks):
            dfs += np.bincount(block.terms_P, minlength=len(dfs))
        starts = np.concatenate(([0], np.cumsum(dfs)))
        rows = np.empty(starts[-1], dtype=np.int32)
        scores = np.empty(starts[-1], dtype=np.float32)
        lengths = np.concatenate([block.lengths_D for block in self._blocks])
        idf, norms = _idf(dfs, len(lengths)), self._norms(lengths)
        heads = starts[:-1].copy()
        for blocks in (self._blocks, self._stop_blocks):  # the same rows, different terms
            first_row = 0
            while blocks:  # frees each block once it is written
                block = blocks.pop(0)
                block_norms = norms[first_row : first_row + len(block.ends_D)]
                pairs = block.ends_D, block.terms_P, block.counts_P
                score_pairs(*pairs, first_row, block_norms, idf, heads, rows, scores)
                first_row += len(block.ends_D)
        np.save(directory / bm25.VALUES_FILE, scores)
        np.save(directory / bm25.ROWS_FILE, rows)
        np.save(directory / bm25.STARTS_FILE, starts)
        np.save(directory / bm25.MAXIMA_FILE, maxima(scores, starts))
        numbers = json.dumps(self._numbers, ensure_ascii=False)
        (directory / bm25.WORDS_FILE).write_text(numbers, encoding="utf-8")
        self._write_params(directory, len(lengths))

    def _norms(self, lengths_N: np.ndarray) -> np.ndarray:
        """The norm ``k1 (1 - b + b len / mean_len)`` of each text, float64."""
        if not lengths_N.any():
            return np.zeros(len(lengths_N))  # there is no pair to score
        return self._k1 * ((1 - self._b) + self._b * lengths_N / lengths_N.mean())

    def _write_params(self, directory: Path, num_texts: int) -> None:
        """Writes the parameters as bm25s does; Forage itself reads only the number of texts."""
        params = {
            "k1": self._k1,
            "b": self._b,
            "delta": 0.5,
            "method": "lucene",
            "idf_method": "lucene",
            "dtype": "float32",
            "int_dtype": "int32",
            "num_docs": num_texts,
            "version": version("bm25s"),
            "backend": "numpy",
        }
        (directory / bm25.PARAMS_FILE).write_text(json.dumps(params, indent=4), encoding="utf-8")


def _idf(dfs_V: np.ndarray, num_texts: int) -> np.ndarray:
    """The weight ``ln(1 + (N - df + 0.5) / (df + 0.5))`` of each term, float32."""
    known, places = np.unique(dfs_V, return_inverse=True)
    # math.log, as in bm25s: the last bit of numpy's logarithm depends on the processor.
    values = [math.log(1 + (num_texts - df + 0.5) / (df + 0.5)) for df in known.tolist()]
    return np.array(values, dtype=np.float32)[places]


def maxima(scores: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The highest score of each column, float32 [V]; 0 if it is empty."""
    maxima = np.zeros(len(starts) - 1, dtype=np.float32)
    # For an empty column, reduceat would return the next column's first score.
    is_filled = starts[1:] > starts[:-1]
    if is_filled.any():
        maxima[is_filled] = np.maximum.reduceat(scores, starts[:-1][is_filled])
    return maxima

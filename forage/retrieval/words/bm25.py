"""BM25 (Lucene's variant): built by bm25s, searched straight from its memory-mapped arrays.

bm25s computes every term's share of every passage's score when the index is built (a sparse matrix,
one column a term); ``forage.retrieval.words.bm25_columns`` searches them with numpy alone, so a
server starts without importing bm25s and its compiler. The score is ``sum_t ln(1 + (N - df + 0.5) /
(df + 0.5)) * tf / (tf + k1 (1 - b + b len / mean_len))`` (Kamphuis et al. 2020,
https://cs.uwaterloo.ca/~jimmylin/publications/Kamphuis_etal_ECIR2020_preprint.pdf). This file knows
texts and rows; it does not know passages, files of corpora or HTTP.
"""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forage.errors import UserError
from forage.retrieval.backend import Scored
from forage.retrieval.words.bm25_columns import Columns

TOKENIZER = "nfkc-lower-words"

_WORD = re.compile(r"[^\W_]+")
_VALUES_FILE = "data.csc.index.npy"
_ROWS_FILE = "indices.csc.index.npy"
_STARTS_FILE = "indptr.csc.index.npy"
_WORDS_FILE = "vocab.index.json"
_PARAMS_FILE = "params.index.json"
_MAXIMA_FILE = "maxima.npy"

_BLOCK_PAIRS = 2**24


def tokenize(text: str) -> list[str]:
    """Lower-case words (runs of letters and digits) after Unicode NFKC, for passage and query.

    ``"Newton's 3rd LAW"`` gives ``["newton", "s", "3rd", "law"]``.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _WORD.findall(text.lower())


class BM25Builder:
    """Collects texts in the order of their rows, then writes the index."""

    def __init__(self, k1: float, b: float) -> None:
        """Free parameters of the formula; raises ``UserError`` outside k1 >= 0, 0 <= b <= 1."""
        if not k1 >= 0:
            raise UserError(f"k1 is {k1}; it must be 0 or more (0.9 and 1.2 are common)")
        if not 0 <= b <= 1:
            raise UserError(f"b is {b}; it must lie between 0 and 1 (0.4 and 0.75 are common)")
        self._k1, self._b = k1, b
        self._words: dict[str, int] = {}
        self._word_ids: list[array[int]] = []

    def add(self, text: str) -> None:
        """Add the text of the next row."""
        words = self._words
        ids = [words.setdefault(word, len(words)) for word in tokenize(text)]
        self._word_ids.append(array("i", ids))

    def write(self, directory: Path) -> None:
        """Score every term of every text and save the matrix into ``directory``."""
        import bm25s  # pulls in a compiler: a second that only building pays

        engine = bm25s.BM25(method="lucene", k1=self._k1, b=self._b, backend="numpy")
        if not self._words:
            # Texts without a single word: one word that occurs nowhere keeps the matrix legal.
            self._words[""] = 0
        with np.errstate(invalid="ignore"):  # texts without any word have a mean length of 0
            engine.index(
                (self._word_ids, self._words), create_empty_token=False, show_progress=False
            )
        engine.save(directory, show_progress=False)
        _save_maxima(directory)


def cut_rows(directory: Path, rows: range, out: Path) -> None:
    """Save into ``out`` the index of ``rows`` alone, with the scores that they have in the whole.

    An index of those texts alone would score them by their own word counts. Memory is that of a
    block of pairs, whatever the size of the index. The directory has been opened without error.
    """
    values = np.load(directory / _VALUES_FILE, mmap_mode="r")
    pair_rows = np.load(directory / _ROWS_FILE, mmap_mode="r")
    starts = np.load(directory / _STARTS_FILE)
    firsts = range(0, len(pair_rows), _BLOCK_PAIRS)
    blocks = [slice(first, first + _BLOCK_PAIRS) for first in firsts]
    num_kept = sum(int(_lies_in(pair_rows[block], rows).sum()) for block in blocks)
    save = np.lib.format.open_memmap
    new_values = save(out / _VALUES_FILE, "w+", values.dtype, (num_kept,))
    new_rows = save(out / _ROWS_FILE, "w+", pair_rows.dtype, (num_kept,))
    new_starts = np.full_like(starts, num_kept)
    done = 0
    for block in blocks:
        is_kept = _lies_in(pair_rows[block], rows)
        kept_before = done + np.concatenate(([0], np.cumsum(is_kept)))
        # The columns that begin in this block begin where the kept pairs before them end.
        first, last = np.searchsorted(starts, (block.start, block.stop))
        new_starts[first:last] = kept_before[starts[first:last] - block.start]
        end = int(kept_before[-1])
        new_values[done:end] = values[block][is_kept]
        new_rows[done:end] = pair_rows[block][is_kept] - rows.start
        done = end
    np.save(out / _STARTS_FILE, new_starts)
    del new_values, new_rows
    _save_maxima(out)
    shutil.copyfile(directory / _WORDS_FILE, out / _WORDS_FILE)
    params = json.loads((directory / _PARAMS_FILE).read_text(encoding="utf-8"))
    params["num_docs"] = len(rows)
    (out / _PARAMS_FILE).write_text(json.dumps(params), encoding="utf-8")


def _save_maxima(directory: Path) -> None:
    """The highest score of each column, float32 [V], beside the columns; 0 for an empty one."""
    values = np.load(directory / _VALUES_FILE, mmap_mode="r")
    starts = np.load(directory / _STARTS_FILE)
    maxima = np.zeros(len(starts) - 1, dtype=np.float32)
    # reduceat gives the next column's first score for an empty one: leave those out.
    is_filled = starts[1:] > starts[:-1]
    if is_filled.any():
        maxima[is_filled] = np.maximum.reduceat(values, starts[:-1][is_filled])
    np.save(directory / _MAXIMA_FILE, maxima)


def _lies_in(pair_rows: np.ndarray, rows: range) -> np.ndarray:
    return (pair_rows >= rows.start) & (pair_rows < rows.stop)


class BM25:
    """A built index: one column of (row, score) pairs a term, memory-mapped."""

    name = "bm25"

    def __init__(self, directory: Path) -> None:
        """Map the arrays of ``directory``; raises ``UserError`` where they are damaged."""
        try:
            values = np.load(directory / _VALUES_FILE, mmap_mode="r")
            rows = np.load(directory / _ROWS_FILE, mmap_mode="r")
            starts = np.load(directory / _STARTS_FILE)
            maxima = np.load(directory / _MAXIMA_FILE)
            self._words: dict[str, int] = json.loads(
                (directory / _WORDS_FILE).read_text(encoding="utf-8")
            )
            params = json.loads((directory / _PARAMS_FILE).read_text(encoding="utf-8"))
            self._num_rows = int(params["num_docs"])
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise UserError(
                f"the BM25 index in {directory} cannot be read ({error}); build the index again"
            ) from error
        num_pairs = int(starts[-1])
        num_columns = len(starts) - 1
        if not (
            len(values) == len(rows) == num_pairs and len(maxima) == num_columns == len(self._words)
        ):
            raise UserError(
                f"the BM25 index in {directory} is damaged: {len(values)} scores, "
                f"{len(rows)} rows, {num_pairs} pairs, {len(self._words)} words in "
                f"{num_columns} columns; build the index again"
            )
        self._columns = Columns(rows, values, starts, maxima, self._num_rows)

    def __len__(self) -> int:
        return self._num_rows

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]:
        """At most ``topk`` rows with a score above 0 for each query; ties by the lower row."""
        assert topk >= 1, f"topk is {topk}; it must be 1 or more"
        return [self._search_one(query, topk) for query in queries]

    def close(self) -> None:
        """The mapped arrays go with the last reference to them."""

    def _search_one(self, query: str, topk: int) -> list[Scored]:
        words = [self._words[word] for word in tokenize(query) if word in self._words]
        rows, scores = self._columns.best(words, topk)
        pairs = zip(rows.tolist(), scores.tolist(), strict=True)
        return [Scored(row, score) for row, score in pairs]

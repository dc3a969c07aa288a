"""Uses questions to choose BM25's k1 and b for an index, and writes them into the index.

The index keeps its counts, so other parameters need new scores but no new build. Half of the
questions determine the choice; the rest measure its gain. ``forage index --tune`` prints both.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forage.errors import UserError
from forage.retrieval.index.index import Index, open_index
from forage.retrieval.store.atomic_directory import atomic_build
from forage.retrieval.store.manifest import MANIFEST_FILE, write_manifest
from forage.retrieval.words import bm25
from forage.retrieval.words.bm25_builder import parameters
from forage.retrieval.words.bm25_index import BM25Manifest
from forage.retrieval.words.counted_columns import CountedColumns, maxima
from forage.rewards.answers import holds_answer
from forage.types import Question

K1S = (0.3, 0.6, 0.9, 1.2, 1.6, 2.0, 3.0)
BS = (0.0, 0.2, 0.4, 0.6, 0.75, 0.9, 1.0)

_MIN_QUESTIONS = 20

_Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result: the recall of each (k1, b) for each question, in the order of ``pairs``.

    ``recalls`` float64 [pairs, questions]; the first ``num_choosing`` questions choose.
    """

    pairs: list[_Pair]
    recalls: np.ndarray
    num_choosing: int
    num_left_out: int
    before: _Pair

    @property
    def chosen(self) -> _Pair:
        """The pair with the highest recall; if several tie, the one closest to the old pair."""
        means = self.recalls[:, : self.num_choosing].mean(axis=1)
        best = [pair for pair, mean in zip(self.pairs, means, strict=True) if mean == means.max()]
        return min(best, key=lambda pair: sum(abs(np.subtract(pair, self.before))))

    def reported(self, pair: _Pair) -> np.ndarray:
        """The recall of a pair for each question that did not choose."""
        return self.recalls[self.pairs.index(pair), self.num_choosing :]


def tune_index(directory: Path, questions: Sequence[Question], topk: int) -> Tuning:
    """Measures the recall in the ``topk`` best passages for each pair of ``K1S`` and ``BS``.

    Recall is the share of a question's gold passages or, if the index has none of them, whether a
    passage contains an answer. Questions with neither are left out. Raises ``UserError`` for an
    index without counts, and if too few questions are left.
    """
    with open_index(directory) as index:
        manifest, backend = index.manifest, index.backend
        if not (isinstance(manifest, BM25Manifest) and isinstance(backend, bm25.BM25)):
            raise UserError(f"{directory} is an index of vectors; only BM25 has k1 and b")
        columns = CountedColumns.open(directory)
        judges = (_Judge(index, question) for question in questions)
        judged = [judge for judge in judges if judge.gold or judge.question.golden_answers]
        if len(judged) < _MIN_QUESTIONS:
            raise UserError(
                f"only {len(judged)} of {len(questions)} questions have an answer or gold passages "
                f"in {directory}; tuning needs {_MIN_QUESTIONS}"
            )
        random.Random(0).shuffle(judged)
        before = manifest.k1, manifest.b
        pairs = list(dict.fromkeys((before, *((k1, b) for k1 in K1S for b in BS))))
        texts = [judge.question.text for judge in judged]
        recalls = np.zeros((len(pairs), len(judged)))
        for place, pair in enumerate(pairs):
            scores = columns.scores(*pair)
            rescored = backend.with_scores(scores, maxima(scores, columns.starts))
            for number, found in enumerate(rescored.search(texts, topk)):
                recalls[place, number] = judged[number].recall([one.row for one in found])
    num_choosing = (len(judged) + 1) // 2
    return Tuning(pairs, recalls, num_choosing, len(questions) - len(judged), before)


class _Judge:
    """Judges the rows found for a question."""

    def __init__(self, index: Index, question: Question) -> None:
        self.question = question
        rows = map(index.store.row_of, question.gold_passage_ids)
        self.gold = frozenset(row for row in rows if row is not None)
        self._store = index.store
        self._holds: dict[int, bool] = {}

    def recall(self, rows: Sequence[int]) -> float:
        """The share of gold passages among ``rows``; without gold, 1 if a row has an answer."""
        if self.gold:
            return len(self.gold.intersection(rows)) / len(self.gold)
        return float(any(map(self._holds_answer, rows)))

    def _holds_answer(self, row: int) -> bool:
        if row not in self._holds:
            contents = self._store.passage(row).contents
            self._holds[row] = holds_answer(contents, self.question.golden_answers)
        return self._holds[row]


def write_parameters(directory: Path, k1: float, b: float) -> None:
    """Changes the parameters of an index, as if it had been built with them."""
    directory = directory.resolve()
    with open_index(directory) as index:
        manifest = index.manifest
    columns = CountedColumns.open(directory)
    written = {bm25.VALUES_FILE, bm25.MAXIMA_FILE, bm25.PARAMS_FILE, MANIFEST_FILE}
    with atomic_build(directory) as new:
        for path in _files(directory):
            if path.name not in written:
                _link(path, new / path.name)
        scores = columns.scores(k1, b)
        np.save(new / bm25.VALUES_FILE, scores)
        np.save(new / bm25.MAXIMA_FILE, maxima(scores, columns.starts))
        params = json.dumps(parameters(k1, b, len(columns.lengths_N)), indent=4)
        (new / bm25.PARAMS_FILE).write_text(params, encoding="utf-8")
        write_manifest(new, manifest.model_copy(update={"k1": k1, "b": b, "files": None}))


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if path.is_file())


def _link(path: Path, new: Path) -> None:
    """Hard-links a file that never changes, or copies it if the disk does not support links."""
    with suppress(OSError):
        os.link(path, new)
        return
    shutil.copyfile(path, new)

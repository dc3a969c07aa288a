"""Chooses the questions to evaluate: a subset with the same proportions as the whole file.

A file of several sets begins with thousands of questions of the first set, so its beginning is not
representative. Here each stratum (data source and number of hops) is shuffled, and the strata are
interleaved, so that every prefix of the list is a stratified sample. A smaller subset is contained
in a larger one, so an extended evaluation plays only the new questions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from forage.config.run_config import RunConfig
from forage.data.published.benchmarks import require_file
from forage.data.questions import read_questions
from forage.errors import UserError
from forage.types import Question


def questions_to_evaluate(config: RunConfig) -> list[Question]:
    """Selects ``evaluation.num_questions`` questions of ``data.test`` to evaluate; raises
    ``UserError``.
    """
    if config.data.test is None:
        raise UserError("data.test is missing: name a file of questions to evaluate on")
    require_file(config.data.test, config.data.test_sets, "test")
    questions = read_questions(config.data.test, config.data.test_form)
    settings = config.evaluation
    return stratified(questions, settings.num_questions, settings.subset_seed)


def training_subset(questions: Sequence[Question], config: RunConfig) -> list[Question]:
    """The subset of these questions to evaluate every ``evaluation.every`` steps of training."""
    settings = config.evaluation
    return stratified(questions, settings.num_training_questions, settings.subset_seed)


def stratified(questions: Sequence[Question], size: int | None, seed: int | None) -> list[Question]:
    """At most ``size`` questions in which each stratum has its share, to within one question.

    Question r of the n of a stratum gets the position (r + 1/2) / n, and the list in that order is
    truncated. The result is in file order. If ``seed`` is None, each stratum's first questions are
    taken instead of random ones.

    Six easy questions (e) and three hard ones (h), truncated to three, give two and one::

        place   1/12 1/6 3/12 5/12 1/2 7/12 9/12 5/6 11/12
        kind     e    h   e    e    h   e    e    h   e
    """
    if size is None or size >= len(questions):
        return list(questions)
    strata: dict[tuple[str, int], list[int]] = {}
    for row, question in enumerate(questions):
        strata.setdefault((question.source, question.num_hops or 0), []).append(row)
    placed: list[tuple[float, int]] = []
    for (source, hops), rows in strata.items():
        if seed is not None:
            random.Random(f"{seed}/{source}/{hops}").shuffle(rows)
        placed += [((rank + 0.5) / len(rows), row) for rank, row in enumerate(rows)]
    placed.sort()
    return [questions[row] for row in sorted(row for _, row in placed[:size])]

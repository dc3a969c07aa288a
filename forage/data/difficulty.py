"""How hard questions have proved to be: their success rate over recorded episodes.

Measured by an earlier run or an evaluation (any episode file), used to order questions and to
keep those of a band, since a question that is always or never answered teaches a group nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forage.errors import UserError
from forage.records import read_episodes
from forage.types import Question, Status

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difficulty:
    """The share of a question's episodes that answered it exactly (EM), by question id."""

    success_rate: dict[str, float]

    def keep_band(
        self, questions: Sequence[Question], lowest: float, highest: float
    ) -> list[Question]:
        """The questions with a rate from ``lowest`` to ``highest``; raises ``UserError`` for none.

        Questions that were never measured are left out; the log says how many.
        """
        kept = [
            question
            for question in questions
            if lowest <= self.success_rate.get(question.id, -1.0) <= highest
        ]
        num_unknown = sum(question.id not in self.success_rate for question in questions)
        LOG.info(
            "kept %d of %d questions with a success rate from %g to %g; %d were never measured",
            len(kept), len(questions), lowest, highest, num_unknown,
        )  # fmt: skip
        if not kept:
            raise UserError(
                f"no question has a measured success rate from {lowest} to {highest} "
                f"({num_unknown} of {len(questions)} were never measured); widen "
                "data.min_success and data.max_success, or measure them"
            )
        return kept


def measure_difficulty(path: Path, questions: Sequence[Question]) -> Difficulty:
    """Success rates of ``questions`` from an episode file; raises ``UserError`` if none is there.

    Episodes that the engine or a search failed, and those of other arms than the normal one, say
    nothing about a question and do not count.
    """
    wanted = {question.id for question in questions}
    scores: dict[str, list[float]] = {}
    for record in read_episodes(path):
        episode = record.episode
        has_failed = episode.status in (Status.ENGINE_FAILED, Status.SEARCH_FAILED)
        if has_failed or record.arm not in (None, "normal") or episode.reward is None:
            continue
        if episode.question.id in wanted:
            scores.setdefault(episode.question.id, []).append(episode.reward.parts["em"])
    if not scores:
        raise UserError(
            f"data.difficulty is {path}, which holds no scored episode of the training questions; "
            "name the episodes of a run or an evaluation that played them"
        )
    return Difficulty({i: sum(those) / len(those) for i, those in scores.items()})

"""Which questions a training step asks, and which it may ask beside them.

Both are functions of the step and the run's seed alone, so that a resumed run asks the same.
Nothing here knows what earlier steps found out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from forage.data.order import QuestionOrder
from forage.types import Question


@dataclass(frozen=True, slots=True)
class StepQuestions:
    """The questions of each step: its own ``num_own``, and up to ``num_spare`` others.

    ``num_questions`` is how many there are in all.
    """

    order: QuestionOrder
    num_questions: int
    num_own: int
    num_spare: int
    seed: int

    def own(self, step: int) -> Sequence[Question]:
        """What the step asks."""
        return self.order.of_step(step, self.num_own)

    def spare(self, step: int) -> list[Question]:
        """Questions beside the step's own, in the run's mixture.

        They stand at positions of the order that no run gets to, as many as could be asked for.
        """
        first = random.Random(f"{self.seed}/spare/{step}").randrange(1 << 40, 1 << 41)
        spare: dict[str, Question] = {}
        own = {question.id for question in self.own(step)}
        for position in range(first, first + 2 * self.num_questions):  # a whole epoch, at least
            question = self.order.at(position)
            if question.id not in own:
                spare.setdefault(question.id, question)
            if len(spare) == self.num_spare:
                break
        return list(spare.values())

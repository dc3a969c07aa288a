"""Which question stands at which position of a run: shuffles, mixing by weight, a curriculum.

The training loop asks for the questions of a step. The answer depends on the position and the seed
alone, never on what was asked before, so that a resumed run asks the same questions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from forage.data.difficulty import Difficulty
from forage.errors import UserError
from forage.types import Question

MIX_BLOCK = 1000
"""Positions within which sources come in the proportions of their weights, to within one."""


class QuestionOrder:
    """An endless sequence over questions, epoch after epoch; position p is always the same."""

    def __init__(
        self,
        questions: Sequence[Question],
        seed: int,
        weights: Mapping[str, float] | None = None,
        difficulty: Difficulty | None = None,
    ) -> None:
        """``weights``: share of each source; ``difficulty``: easy questions first, in epoch 0.

        Without weights, sources come as often as the file has them. Raises ``UserError``.
        """
        assert questions, "an order of no questions"
        self._seed = seed
        if weights:
            by_source = _by_source(questions, weights)
            self._pools = {
                source: _Pool(those, f"{seed}/{source}", difficulty)
                for source, those in by_source.items()
            }
            self._block = _block({source: weights[source] for source in by_source})
        else:
            self._pools = {"": _Pool(questions, str(seed), difficulty)}
            self._block = ("",)
        self._num_in_block = Counter(self._block)

    def at(self, position: int) -> Question:
        """The question at a position, from 0 on."""
        block, place = divmod(position, len(self._block))
        source, drawn_in_block = _draw(self._block, f"{self._seed}/mix/{block}")[place]
        num_drawn = block * self._num_in_block[source] + drawn_in_block
        return self._pools[source].at(num_drawn)

    def of_step(self, step: int, size: int) -> list[Question]:
        """The questions of a step of ``size`` questions."""
        return [self.at(position) for position in range(step * size, (step + 1) * size)]


class _Pool:
    """Questions that are drawn from in seeded shuffles, one an epoch."""

    def __init__(
        self, questions: Sequence[Question], seed: str, difficulty: Difficulty | None
    ) -> None:
        self._questions = questions
        self._seed = seed
        self._difficulty = difficulty
        # The order of an epoch is asked for position by position, and rarely across its end.
        self._order = lru_cache(maxsize=2)(self._order_of)

    def at(self, num_drawn: int) -> Question:
        epoch, index = divmod(num_drawn, len(self._questions))
        return self._questions[self._order(epoch)[index]]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._questions)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        if self._difficulty is not None and epoch == 0:
            rate = self._difficulty.success_rate
            # Sorting is stable: questions that are equally hard stay shuffled.
            order.sort(key=lambda index: -rate.get(self._questions[index].id, -1.0))
        return order


def _by_source(
    questions: Sequence[Question], weights: Mapping[str, float]
) -> dict[str, list[Question]]:
    """The questions of each source of a positive weight; raises ``UserError``."""
    by_source: dict[str, list[Question]] = {}
    for question in questions:
        by_source.setdefault(question.source, []).append(question)
    there = ", ".join(sorted(by_source))
    if unknown := sorted(set(weights) - set(by_source)):
        raise UserError(
            f"data.weights names {', '.join(unknown)}, but the questions come from {there}"
        )
    if forgotten := sorted(set(by_source) - set(weights)):
        raise UserError(
            f"data.weights says nothing of {', '.join(forgotten)}; give a weight to each source "
            "of the questions, 0 to leave it out"
        )
    return {source: those for source, those in by_source.items() if weights[source] > 0}


def _block(weights: Mapping[str, float]) -> tuple[str, ...]:
    """``MIX_BLOCK`` sources in the proportions of ``weights``, by largest remainder."""
    total = sum(weights.values())
    exact = {source: MIX_BLOCK * weight / total for source, weight in weights.items()}
    counts = {source: int(share) for source, share in exact.items()}
    by_remainder = sorted(exact, key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: MIX_BLOCK - sum(counts.values())]:
        counts[source] += 1
    for source, count in counts.items():
        if count == 0:
            raise UserError(
                f"data.weights: {source} has less than one question in {MIX_BLOCK}; raise its "
                "weight, or set it to 0"
            )
    return tuple(source for source, count in counts.items() for _ in range(count))


@lru_cache(maxsize=2)
def _draw(block: tuple[str, ...], seed: str) -> list[tuple[str, int]]:
    """The block shuffled: at each place its source, and how often that came before in the block."""
    order = list(block)
    if len(set(block)) > 1:
        random.Random(seed).shuffle(order)
    seen: Counter[str] = Counter()
    drawn: list[tuple[str, int]] = []
    for source in order:
        drawn.append((source, seen[source]))
        seen[source] += 1
    return drawn

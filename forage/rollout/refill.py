"""Groups that teach nothing are replaced: more questions are played until enough groups vary.

Between the scheduler and the loop. It ends after a bounded number of rounds, or when there are no
more questions, and says how many groups varied; what a group is worth is the caller's to tell.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forage.algorithms.dynamic_sampling import choose
from forage.types import Group, Question

PlayMore = Callable[[Sequence[Question], int], Awaitable[list[Group]]]
"""Plays groups of these questions; the number is the round's, from 1."""


@dataclass(frozen=True, slots=True)
class Refilled:
    """The groups to learn from, in the order played, and all that were played for them."""

    chosen: tuple[Group, ...]
    played: tuple[Group, ...]
    num_rounds: int


async def refill(
    groups: Sequence[Group],
    num_wanted: int,
    is_flat: Callable[[Group], bool],
    spare_questions: Sequence[Question],
    play_more: PlayMore,
    max_rounds: int,
    oversampling: float,
) -> Refilled:
    """The first ``num_wanted`` groups that are not flat, of ``groups`` and of those played more.

    Each round plays ``oversampling`` times as many groups as are missing, from
    ``spare_questions`` in order. Fewer are chosen where the rounds or the questions run out.
    """
    played = list(groups)
    flat = [is_flat(group) for group in played]
    num_rounds = num_used = 0
    while num_rounds < max_rounds:
        num_missing = num_wanted - flat.count(False)
        questions = spare_questions[num_used : num_used + round(num_missing * oversampling)]
        if num_missing <= 0 or not questions:
            break
        num_rounds += 1
        num_used += len(questions)
        more = await play_more(questions, num_rounds)
        played += more
        flat += [is_flat(group) for group in more]
    chosen = tuple(played[index] for index in choose(flat, num_wanted))
    return Refilled(chosen, tuple(played), num_rounds)

"""Groups that teach nothing are replaced: more questions are played until enough groups vary.

Between the scheduler and the loop. It ends after a bounded number of rounds, or when there are no
more questions, and says so when nothing varied at all; what a group earned is the caller's to tell.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import ceil

from forage.algorithms.dynamic_sampling import DynamicSamplingConfig, choose
from forage.errors import UserError
from forage.rollout.play.scheduler import GroupScheduler
from forage.types import Episode, Group, Question

LOG = logging.getLogger(__name__)

PlayMore = Callable[[Sequence[Question], int], Awaitable[list[Group]]]
"""Plays groups of these questions; the number is the round's, from 1."""


class NothingToLearn(UserError):
    """All groups of a step were flat, also those played in their place."""


@dataclass(frozen=True, slots=True)
class Refilled:
    """The groups to learn from, in the order played, and all that were played for them."""

    chosen: tuple[Group, ...]
    played: tuple[Group, ...]
    num_rounds: int = 0


@dataclass(frozen=True, slots=True)
class GroupSource:
    """The groups of each step as the loop learns them.

    ``spare_questions`` gives what may be played in a step beside its own ``num_wanted`` questions.
    """

    config: DynamicSamplingConfig | None
    scheduler: GroupScheduler
    num_wanted: int
    spare_questions: Callable[[int], Sequence[Question]]
    is_flat: Callable[[Group], bool]
    is_learnable: Callable[[Episode], bool]

    async def groups_of(self, step: int) -> Refilled:
        """The next step's groups, flat ones replaced if the config says so.

        Raises ``NothingToLearn`` where none varies, unless all were spoilt from outside: searches
        that fail say nothing about the questions.
        """
        groups = await self.scheduler.next_groups()
        if self.config is None:
            return Refilled(tuple(groups), tuple(groups))
        found = await refill(
            groups,
            self.num_wanted,
            self.is_flat,
            self.spare_questions(step)[num_oversampled(self.config, self.num_wanted) :],
            lambda questions, number: self.scheduler.more_groups(questions, f"{step}+{number}"),
            self.config.max_rounds,
            self.config.oversampling,
        )
        episodes = [episode for group in found.played for episode in group.episodes_G]
        if not found.chosen and not any(map(self.is_learnable, episodes)):
            return Refilled(found.played, found.played, found.num_rounds)
        if not found.chosen:
            raise NothingToLearn(
                f"in each of the {len(found.played)} groups of step {step} (after "
                f"{found.num_rounds} rounds of algorithm.dynamic_sampling) all episodes earned the "
                "same: the questions are all too hard or all too easy for the policy, or the "
                "reward tells nothing apart. Change data.train, reward or trainer.group_size, and "
                "go on with --resume"
            )
        if len(found.chosen) < self.num_wanted:
            message = "step %d learns from %d groups: no more of %d varied"
            LOG.warning(message, step, len(found.chosen), len(found.played))
        return found


def num_oversampled(config: DynamicSamplingConfig | None, num_wanted: int) -> int:
    """How many groups beyond those wanted are played from the start."""
    return 0 if config is None else _times(num_wanted, config.oversampling) - num_wanted


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
        num_missing = max(num_wanted - flat.count(False), 0)
        questions = spare_questions[num_used : num_used + _times(num_missing, oversampling)]
        if not questions:
            break
        num_rounds += 1
        num_used += len(questions)
        more = await play_more(questions, num_rounds)
        played += more
        flat += [is_flat(group) for group in more]
    chosen = tuple(played[index] for index in choose(flat, num_wanted))
    return Refilled(chosen, tuple(played), num_rounds)


def _times(count: int, oversampling: float) -> int:
    """Rounded up, but for the rounding of the product itself."""
    return ceil(count * oversampling - 1e-9)

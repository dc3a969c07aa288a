"""GRPO: an episode's reward against the mean and the deviation of its group.

A reward is None for an episode that is kept out of the loss (a failed search, a failed engine): it
moves no baseline and gets no advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Literal

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator

STD_EPSILON = 1e-6


class Grpo(Estimator):
    """The reward less the mean of the group, over the group's standard deviation."""

    kind: Literal["grpo"] = "grpo"
    normalise_by_std: bool = True
    """Divide by the standard deviation of the group's rewards."""

    def advantages(
        self, rewards_G: Sequence[float], group: EarnedByGroup
    ) -> Sequence[float | None]:
        return grpo_advantages(rewards_G, self.normalise_by_std)


def grpo_advantages(
    rewards_G: Sequence[float | None], normalise_by_std: bool
) -> tuple[float | None, ...]:
    """Reward minus the group's mean, over the group's sample standard deviation if asked.

    ``normalise_by_std`` True is GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2), False the
    variant without it (Dr. GRPO, https://arxiv.org/abs/2503.20783). A group of one gets 0.
    """
    kept = [reward for reward in rewards_G if reward is not None]
    if not kept:
        return tuple(None for _ in rewards_G)
    mean = sum(kept) / len(kept)
    scale = 1.0
    if normalise_by_std:
        variance = sum((reward - mean) ** 2 for reward in kept) / max(len(kept) - 1, 1)
        scale = sqrt(variance) + STD_EPSILON
    return tuple(None if reward is None else (reward - mean) / scale for reward in rewards_G)

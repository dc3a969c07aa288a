"""From the rewards of a group to one advantage an episode.

Pure functions of numbers. An episode that is kept out of the loss (a failed search, a failed
engine) has no reward here: it is None, it moves no baseline and it gets no advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

STD_EPSILON = 1e-6


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


def rloo_advantages(rewards_G: Sequence[float | None]) -> tuple[float | None, ...]:
    """Reward minus the mean of the group's other episodes; a group of one gets 0.

    Source: https://arxiv.org/abs/2402.14740, equation 5.
    """
    kept = [reward for reward in rewards_G if reward is not None]
    total, others = sum(kept), len(kept) - 1
    return tuple(
        None if reward is None else (reward - (total - reward) / others if others else 0.0)
        for reward in rewards_G
    )

"""From the rewards of a group to one advantage an episode.

Pure functions of numbers. An episode that is kept out of the loss (a failed search, a failed
engine) has no reward here: it is None, it moves no baseline and it gets no advantage. Estimators
that tell the tokens of an episode apart are in ``gae.py`` and ``turn_credit.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


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


def advantages_over(
    rewards_G: Sequence[float | None], baseline: float | None
) -> tuple[float | None, ...]:
    """Reward minus a baseline that the episodes had no part in; without one nobody gets any.

    The baseline is a number from before (REINFORCE, https://doi.org/10.1007/BF00992696), or the
    reward of the same question's greedy episode (ReMax, https://arxiv.org/abs/2310.10505).
    """
    return tuple(
        None if reward is None or baseline is None else reward - baseline for reward in rewards_G
    )


def next_baseline(
    baseline: float | None, rewards: Sequence[float | None], decay: float
) -> float | None:
    """The running baseline after a step: ``decay`` of the old one and the rest of the step's mean.

    None before the first step, which starts it; a step of which nothing is kept leaves it.
    """
    kept = [reward for reward in rewards if reward is not None]
    if not kept:
        return baseline
    mean = fsum(kept) / len(kept)
    return mean if baseline is None else decay * baseline + (1.0 - decay) * mean


def whiten(values_BM: Sequence[Sequence[float]]) -> list[list[float]]:
    """Values with mean 0 and standard deviation 1 over all the sampled tokens of all episodes.

    The batch's own mean and population deviation, as REINFORCE++ has it
    (https://arxiv.org/abs/2501.03262); a single token becomes 0.
    """
    flat = [value for values_M in values_BM for value in values_M]
    if not flat:
        return [[] for _ in values_BM]
    mean = fsum(flat) / len(flat)
    std = sqrt(fsum((value - mean) ** 2 for value in flat) / len(flat))
    scale = 1.0 / (std + WHITEN_EPSILON)
    return [[(value - mean) * scale for value in values_M] for values_M in values_BM]

"""GRPO for pass@k: credits only a group's best episode, with its lead over the second."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Literal

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator
from forage.algorithms.credit.grpo import STD_EPSILON


class GrpoPassK(Estimator):
    """The best episode's lead over the second, 0 for all others (2503.19595)."""

    kind: Literal["grpo_passk"] = "grpo_passk"
    normalise_by_std: bool = True
    """Divide by the standard deviation of the group's rewards."""

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> Sequence[float]:
        return grpo_passk_advantages(rewards_G, self.normalise_by_std)


def grpo_passk_advantages(rewards_G: Sequence[float], normalise_by_std: bool) -> tuple[float, ...]:
    """The best reward minus the second, for the best episode; a group of one gets 0.

    In a tie all get 0. Source: https://arxiv.org/abs/2503.19595; veRL's ``grpo_passk``.
    """
    size = len(rewards_G)
    if size < 2:
        return (0.0,) * size
    second, best = sorted(rewards_G)[-2:]
    scale = 1.0
    if normalise_by_std:
        mean = sum(rewards_G) / size
        scale = sqrt(sum((reward - mean) ** 2 for reward in rewards_G) / (size - 1)) + STD_EPSILON
    at = rewards_G.index(best)
    return tuple((best - second) / scale if i == at else 0.0 for i in range(size))

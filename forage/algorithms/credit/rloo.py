"""RLOO: an episode's reward minus the mean of the group's other episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator


class Rloo(Estimator):
    """The reward minus the mean of the group's other episodes."""

    kind: Literal["rloo"] = "rloo"

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> Sequence[float]:
        return rloo_advantages(rewards_G)


def rloo_advantages(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """Reward minus the mean of the group's other episodes; a group of one gets 0.

    Source: https://arxiv.org/abs/2402.14740, equation 5.
    """
    total, others = sum(rewards_G), len(rewards_G) - 1
    return tuple(reward - (total - reward) / others if others else 0.0 for reward in rewards_G)

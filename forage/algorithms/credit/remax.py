"""ReMax: an episode's reward minus that of the question's greedy episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator


class Remax(Estimator):
    """The reward minus that of a greedy episode (https://arxiv.org/abs/2310.10505)."""

    kind: Literal["remax"] = "remax"
    plays_greedy: ClassVar[bool] = True

    @property
    def min_group_size(self) -> int:
        return 1

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> Sequence[float]:
        return [reward - group.greedy_reward for reward in rewards_G]

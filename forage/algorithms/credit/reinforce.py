"""REINFORCE: an episode's reward against a baseline of one's choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forage.algorithms.credit.baselines import BaselineChoice
from forage.algorithms.credit.estimator import EarnedByGroup
from forage.algorithms.credit.grpo import grpo_advantages


class Reinforce(BaselineChoice):
    """The reward less a baseline (https://doi.org/10.1007/BF00992696)."""

    kind: Literal["reinforce"] = "reinforce"

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> Sequence[float]:
        if self.baseline.kind == "group":
            return grpo_advantages(rewards_G, normalise_by_std=False)
        baseline = self.baseline_of(rewards_G, group)
        return [reward - baseline for reward in rewards_G]

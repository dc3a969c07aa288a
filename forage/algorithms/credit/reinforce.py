"""REINFORCE: an episode's reward against a baseline of one's choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forage.algorithms.credit.baselines import BaselineChoice, advantages_over, baseline_or_mean
from forage.algorithms.credit.estimator import EarnedByGroup
from forage.algorithms.credit.grpo import grpo_advantages


class Reinforce(BaselineChoice):
    """The reward less a baseline (https://doi.org/10.1007/BF00992696)."""

    kind: Literal["reinforce"] = "reinforce"

    def advantages(
        self, rewards_G: Sequence[float], group: EarnedByGroup
    ) -> Sequence[float | None]:
        match self.baseline.kind:
            case "group":
                return grpo_advantages(rewards_G, normalise_by_std=False)
            case "running":
                baseline = baseline_or_mean(group.running_baseline, rewards_G)
                return advantages_over(rewards_G, baseline)
            case "none":
                return advantages_over(rewards_G, 0.0)

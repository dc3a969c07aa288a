"""Dr. GRPO: an episode's reward against the mean of its group, with no divisor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator
from forage.algorithms.credit.grpo import grpo_advantages


class DrGrpo(Estimator):
    """The reward less the mean of the group; goes with aggregate: constant."""

    kind: Literal["dr_grpo"] = "dr_grpo"

    def advantages(
        self, rewards_G: Sequence[float], group: EarnedByGroup
    ) -> Sequence[float | None]:
        return grpo_advantages(rewards_G, normalise_by_std=False)

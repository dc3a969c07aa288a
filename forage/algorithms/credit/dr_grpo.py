"""Dr. GRPO: an episode's reward against the mean of its group, with no divisor."""

from __future__ import annotations

from typing import Literal

from forage.algorithms.credit.estimator import (
    EarnedByGroup,
    Estimator,
    TokenCredit,
    rewards_less_leash,
    same_for_all_tokens,
)
from forage.algorithms.credit.grpo import grpo_advantages


class DrGrpo(Estimator):
    """The reward less the mean of the group; goes with aggregate: constant."""

    kind: Literal["dr_grpo"] = "dr_grpo"

    def credit(self, group: EarnedByGroup) -> list[TokenCredit]:
        rewards_G = rewards_less_leash(group.members_G)
        advantages_G = grpo_advantages(rewards_G, normalise_by_std=False)
        return same_for_all_tokens(advantages_G, group.members_G)

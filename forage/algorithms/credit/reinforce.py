"""REINFORCE: an episode's reward against a baseline of one's choice."""

from __future__ import annotations

from typing import Literal

from forage.algorithms.credit.baselines import (
    Baseline,
    GroupBaseline,
    RunningBaseline,
    advantages_over,
    baseline_or_mean,
)
from forage.algorithms.credit.estimator import (
    EarnedByGroup,
    Estimator,
    TokenCredit,
    rewards_less_leash,
    same_for_all_tokens,
)
from forage.algorithms.credit.grpo import grpo_advantages


class Reinforce(Estimator):
    """The reward less a baseline (https://doi.org/10.1007/BF00992696)."""

    kind: Literal["reinforce"] = "reinforce"
    baseline: Baseline = GroupBaseline()
    """What is taken off the reward of each episode."""

    @property
    def needs_groups(self) -> bool:
        return isinstance(self.baseline, GroupBaseline)

    @property
    def baseline_decay(self) -> float | None:
        return self.baseline.decay if isinstance(self.baseline, RunningBaseline) else None

    def credit(self, group: EarnedByGroup) -> list[TokenCredit]:
        rewards_G = rewards_less_leash(group.members_G)
        match self.baseline.kind:
            case "group":
                advantages_G = grpo_advantages(rewards_G, normalise_by_std=False)
            case "running":
                baseline = baseline_or_mean(group.running_baseline, rewards_G)
                advantages_G = advantages_over(rewards_G, baseline)
            case "none":
                advantages_G = advantages_over(rewards_G, 0.0)
        return same_for_all_tokens(advantages_G, group.members_G)

"""ReMax: an episode's reward against that of the same question's greedy episode."""

from __future__ import annotations

from typing import ClassVar, Literal

from forage.algorithms.credit.baselines import advantages_over
from forage.algorithms.credit.estimator import (
    EarnedByGroup,
    Estimator,
    TokenCredit,
    rewards_less_leash,
    same_for_all_tokens,
)


class Remax(Estimator):
    """The reward less that of one more episode, played greedily."""

    kind: Literal["remax"] = "remax"
    plays_greedy: ClassVar[bool] = True

    @property
    def needs_groups(self) -> bool:
        return False

    def credit(self, group: EarnedByGroup) -> list[TokenCredit]:
        rewards_G = rewards_less_leash(group.members_G)
        advantages_G = advantages_over(rewards_G, group.greedy_reward)
        return same_for_all_tokens(advantages_G, group.members_G)

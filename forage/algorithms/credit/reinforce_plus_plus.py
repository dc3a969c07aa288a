"""REINFORCE++: each token's discounted return less a baseline, whitened over the step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forage.algorithms.credit.baselines import BaselineChoice
from forage.algorithms.credit.estimator import EarnedByGroup, TokenCredit
from forage.algorithms.credit.gae import discounted_returns
from forage.algorithms.credit.turn_credit import TurnRewards, token_rewards


class ReinforcePlusPlus(BaselineChoice, TurnRewards):
    """The discounted return of each token less a baseline (https://arxiv.org/abs/2501.03262)."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    discount: float = Field(default=1.0, gt=0, le=1)
    """What a reward is worth one token earlier."""

    @property
    def is_whitened(self) -> bool:
        return True

    def credit(self, group: EarnedByGroup) -> list[TokenCredit]:
        baseline = self.baseline_of([member.total for member in group.members_G], group)
        credit: list[TokenCredit] = []
        for member in group.members_G:
            returns_M = discounted_returns(token_rewards(member), self.discount)
            credit.append(TokenCredit([value - baseline for value in returns_M]))
        return credit

"""A custom estimator and a custom loss, in both forms: a class with settings, and a function.

forage train RECIPE algorithm.advantage=examples.algorithms:OverBest
forage train RECIPE algorithm.loss=examples.algorithms:plain_loss
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator
from forage.algorithms.loss.loss import Loss
from forage.batch import Metrics, Tokens


class OverBest(Estimator):
    """The reward minus the best one of the question's other episodes."""

    factor: float = Field(default=1.0, gt=0)
    """Multiplies each advantage."""

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> list[float]:
        if len(rewards_G) < 2:
            return [0.0] * len(rewards_G)
        best, second = sorted(rewards_G, reverse=True)[:2]
        return [self.factor * (r - (second if r == best else best)) for r in rewards_G]


def centred(rewards_G: Sequence[float]) -> list[float]:
    """The reward minus the midpoint between the group's best and worst rewards."""
    middle = (max(rewards_G) + min(rewards_G)) / 2 if rewards_G else 0.0
    return [reward - middle for reward in rewards_G]


class BoundedRatio(Loss):
    """The policy gradient with the probability ratio capped, and no gradient beyond the cap."""

    cap: float = Field(default=2.0, gt=1)
    """The largest ratio."""

    def policy_loss(self, logprobs_M: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_M = (logprobs_M - tokens.old_logprobs_M).exp()
        is_capped_M = (ratio_M > self.cap).float()
        loss_M = -ratio_M.clamp(max=self.cap) * tokens.advantages_M
        return loss_M, {"loss/capped_fraction": is_capped_M}


def plain_loss(logprobs_M: Tensor, tokens: Tokens) -> Tensor:
    """The policy gradient without a ratio."""
    return -logprobs_M * tokens.advantages_M

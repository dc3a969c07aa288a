"""DRO: the policy gradient with a quadratic penalty on the log ratio, and no clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from forage.algorithms.loss.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Metrics, Tokens


class DroLoss(Loss):
    """The policy gradient and a quadratic penalty on the log ratio (2405.19107)."""

    kind: Literal["dro"] = "dro"
    beta: float = Field(gt=0)
    """Factor of the penalty."""

    def policy_loss(self, logprobs_M: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return dro_loss(logprobs_M, tokens.old_logprobs_M, tokens.advantages_M, self.beta)


def dro_loss(
    logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, beta: float
) -> tuple[Tensor, Metrics]:
    """-A log p + beta / 2 (log r)^2.

    Source: https://arxiv.org/abs/2405.19107, in the form of veRL's ``dro`` and Kimi k1.5
    (https://arxiv.org/abs/2501.12599).
    """
    log_ratio_M = logprobs_M - old_logprobs_M
    return 0.5 * beta * log_ratio_M.square() - advantages_M * logprobs_M, {}

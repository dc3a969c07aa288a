"""KL-Cov: the few tokens that would take most of the entropy are held by a divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from forage.algorithms.loss.clip_cov_loss import token_covariances
from forage.algorithms.loss.kl import bounded
from forage.settings import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Metrics, Tokens


class KlCovLoss(Frozen):
    """No clip; a divergence for the tokens of highest covariance (2505.22617)."""

    kind: Literal["kl_cov"] = "kl_cov"
    share: float = Field(default=2e-4, gt=0, le=1)
    """The share of a micro-batch's tokens that are held, at least one token."""
    coefficient: float = Field(default=1.0, gt=0)
    """The factor of the divergence."""

    def policy_loss(self, logprobs_M: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        old_M, advantages_M = tokens.old_logprobs_M, tokens.advantages_M
        return kl_cov_loss(logprobs_M, old_M, advantages_M, self.share, self.coefficient)


def kl_cov_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    share: float,
    coefficient: float,
) -> tuple[Tensor, Metrics]:
    """-r A, and ``coefficient`` |log r| more where the covariance is among the highest.

    Source: https://arxiv.org/abs/2505.22617, section 4.2.
    """
    log_ratio_M = bounded(logprobs_M - old_logprobs_M)
    loss_M = -log_ratio_M.exp() * advantages_M
    # A rank without episodes of its own has no token to hold.
    num_held = min(max(1, int(share * len(loss_M))), len(loss_M))
    held = token_covariances(logprobs_M, advantages_M).topk(num_held).indices
    is_held_M = loss_M.new_zeros(loss_M.shape)
    is_held_M[held] = 1.0
    metrics = {"loss/covariance_fraction": is_held_M}
    return loss_M + is_held_M * coefficient * log_ratio_M.abs(), metrics

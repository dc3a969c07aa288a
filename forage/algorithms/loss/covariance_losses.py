"""Clip-Cov and KL-Cov: the few tokens that would take most of the entropy lose their gradient by
chance, or are held by a divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from forage.algorithms.loss.clipped_loss import clipped_gain
from forage.algorithms.loss.kl import bounded
from forage.settings import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Metrics, Tokens


class ClipCovLoss(Frozen):
    """PPO's clip, and none of the gradient for some high-covariance tokens (2505.22617)."""

    kind: Literal["clip_cov"] = "clip_cov"
    low: float = Field(default=0.2, gt=0, le=1)
    """How far a token's ratio may fall below 1."""
    high: float = Field(default=0.2, gt=0)
    """How far a token's ratio may rise above 1."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """The share of a micro-batch's tokens that lose their gradient, at least one token."""
    min_covariance: float = 1.0
    """Tokens are drawn among those whose covariance is above this."""
    max_covariance: float = 5.0
    """Tokens are drawn among those whose covariance is below this."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_covariance >= self.max_covariance:
            raise ValueError(
                f"algorithm.loss.min_covariance ({self.min_covariance}) is not below "
                f"max_covariance ({self.max_covariance}): no token lies between them"
            )
        return self

    def policy_loss(self, logprobs_M: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        covariances_M = token_covariances(logprobs_M, tokens.advantages_M)
        bounds = (self.min_covariance, self.max_covariance)
        # Drawn alike when a resumed run learns from the same tokens again.
        seed = int(tokens.versions_M.sum()) * 2**20 + len(logprobs_M)
        ratio_M = bounded(logprobs_M - tokens.old_logprobs_M).exp()
        return clip_cov_loss(
            ratio_M,
            tokens.advantages_M,
            covariances_M,
            self.low,
            self.high,
            self.share,
            bounds,
            seed,
        )


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


def token_covariances(logprobs_M: Tensor, advantages_M: Tensor) -> Tensor:
    """(log p - mean log p) (A - mean A) of each token, the means over the micro-batch.

    Their mean is the covariance that the entropy falls by. Source:
    https://arxiv.org/abs/2505.22617, equation 10.
    """
    logprobs_M = logprobs_M.detach()
    return (logprobs_M - logprobs_M.mean()) * (advantages_M - advantages_M.mean())


def clip_cov_loss(
    ratio_M: Tensor,
    advantages_M: Tensor,
    covariances_M: Tensor,
    clip_low: float,
    clip_high: float,
    share: float,
    bounds: tuple[float, float],
    seed: int,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate; ``share`` of the tokens between the bounds, by chance, give 0.

    Tokens that the clip has taken already are not drawn. Source: https://arxiv.org/abs/2505.22617,
    section 4.2.
    """
    import torch  # the settings are read without it

    gain_M, is_clipped_M = clipped_gain(ratio_M, advantages_M, clip_low, clip_high)
    low, high = bounds
    may_M = (covariances_M > low) & (covariances_M < high) & ~is_clipped_M
    candidates = may_M.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    num_drawn = max(1, int(share * len(ratio_M)))
    order = torch.randperm(len(candidates), generator=generator)[:num_drawn]
    kept_M = torch.ones_like(gain_M)
    kept_M[candidates[order.to(candidates.device)]] = 0.0
    metrics = {"loss/clip_fraction": is_clipped_M.float(), "loss/covariance_fraction": 1 - kept_M}
    return -gain_M * kept_M, metrics


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

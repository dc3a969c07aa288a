"""Clip-Cov and KL-Cov: bounds on the few tokens that would cost the most entropy.

Their gradient is dropped at random (Clip-Cov) or penalised by a KL term (KL-Cov). The tokens are
selected once per optimizer step over all its tokens, from the log-probabilities that the ratios
refer to, regardless of micro-batches. The paper uses the current policy and excludes clipped
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from forage.algorithms.loss.clipped_loss import clipped_gain
from forage.algorithms.loss.kl import bounded
from forage.settings import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Metrics, Tokens, Weighed


class ClipCovLoss(Frozen):
    """PPO's clip, and no gradient for some high-covariance tokens (2505.22617)."""

    kind: Literal["clip_cov"] = "clip_cov"
    low: float = Field(default=0.2, gt=0, le=1)
    """How far a token's ratio may fall below 1."""
    high: float = Field(default=0.2, gt=0)
    """How far a token's ratio may rise above 1."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """The share of an optimizer step's tokens that lose their gradient; at least one token."""
    min_covariance: float = 1.0
    """Tokens are drawn from those with a covariance above this."""
    max_covariance: float = 5.0
    """Tokens are drawn from those with a covariance below this."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_covariance >= self.max_covariance:
            raise ValueError(
                f"algorithm.loss.min_covariance ({self.min_covariance}) is not below "
                f"max_covariance ({self.max_covariance}): no token lies between them; raise it"
            )
        return self

    def picked(self, weighed: Sequence[Weighed]) -> list[Weighed]:
        """An optimizer step's episodes, with the tokens marked that lose their gradient.

        A resumed run that learns from the same episodes draws the same tokens. Source:
        https://arxiv.org/abs/2505.22617, section 4.2.
        """
        import torch  # so that the settings load without torch

        covariances_M = covariances(weighed)
        is_between_M = (covariances_M > self.min_covariance) & (covariances_M < self.max_covariance)
        numbers = is_between_M.nonzero()[:, 0]
        versions = [v for each in weighed for s in each.episode.segments for v in s.versions_T]
        generator = torch.Generator().manual_seed(sum(versions) * 2**20 + len(versions))
        order = torch.randperm(len(numbers), generator=generator)
        return _marked(weighed, numbers[order[: _num_of(self.share, covariances_M)]])

    def policy_loss(self, logprobs_M: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        columns = logprobs_M, tokens.old_logprobs_M, tokens.advantages_M, tokens.is_picked_M
        return clip_cov_loss(*columns, self.low, self.high)


class KlCovLoss(Frozen):
    """No clip; a KL term for the tokens of highest covariance (2505.22617)."""

    kind: Literal["kl_cov"] = "kl_cov"
    share: float = Field(default=2e-4, gt=0, le=1)
    """The share of an optimizer step's tokens that get the KL term; at least one token."""
    coefficient: float = Field(default=1.0, gt=0)
    """Factor of the KL term."""

    def picked(self, weighed: Sequence[Weighed]) -> list[Weighed]:
        """An optimizer step's episodes, with the highest-covariance tokens marked."""
        covariances_M = covariances(weighed)
        order = covariances_M.argsort(descending=True, stable=True)
        return _marked(weighed, order[: _num_of(self.share, covariances_M)])

    def policy_loss(self, logprobs_M: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        columns = logprobs_M, tokens.old_logprobs_M, tokens.advantages_M, tokens.is_picked_M
        return kl_cov_loss(*columns, self.coefficient)


def covariances(weighed: Sequence[Weighed]) -> Tensor:
    """(log p - mean log p) (A - mean A) of each trained token [M], with means over all of them.

    p is the policy that the ratios refer to. Entropy falls by their mean. Source:
    https://arxiv.org/abs/2505.22617, equation 10.
    """
    import torch  # so that the settings load without torch

    logprobs_M = torch.cat([each.old_logprobs_M[each.is_kept_M] for each in weighed])
    advantages_M = torch.cat([each.advantages_M[each.is_kept_M] for each in weighed])
    return (logprobs_M - logprobs_M.mean()) * (advantages_M - advantages_M.mean())


def _num_of(share: float, values_M: Tensor) -> int:
    return max(1, int(share * len(values_M)))


def _marked(weighed: Sequence[Weighed], numbers: Tensor) -> list[Weighed]:
    """The episodes with ``is_picked_M`` true at these indices into all their trained tokens."""
    import torch  # so that the settings load without torch

    is_kept_M = torch.cat([each.is_kept_M for each in weighed])
    is_picked_M = torch.zeros_like(is_kept_M)
    is_picked_M[is_kept_M.nonzero()[:, 0][numbers]] = True
    pieces = is_picked_M.split([len(each.is_kept_M) for each in weighed])
    return [replace(each, is_picked_M=mine) for each, mine in zip(weighed, pieces, strict=True)]


def clip_cov_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    is_picked_M: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate, with 0 for the selected tokens.

    Source: https://arxiv.org/abs/2505.22617, section 4.2.
    """
    ratio_M = bounded(logprobs_M - old_logprobs_M).exp()
    gain_M, is_clipped_M = clipped_gain(ratio_M, advantages_M, clip_low, clip_high)
    metrics = {"loss/clip_fraction": is_clipped_M.float()}
    metrics["loss/covariance_fraction"] = is_picked_M.float()
    return -gain_M * ~is_picked_M, metrics


def kl_cov_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    is_picked_M: Tensor,
    coefficient: float,
) -> tuple[Tensor, Metrics]:
    """-r A, plus ``coefficient`` |log r| for the selected tokens.

    Source: https://arxiv.org/abs/2505.22617, section 4.2.
    """
    log_ratio_M = bounded(logprobs_M - old_logprobs_M)
    loss_M = -log_ratio_M.exp() * advantages_M
    held_M = coefficient * log_ratio_M.abs() * is_picked_M
    return loss_M + held_M, {"loss/covariance_fraction": is_picked_M.float()}

"""Policy-gradient losses: one number a token; ``aggregation`` makes them the loss of a batch.

Pure tensor functions that return (loss a token, metrics a token). Tokens that the policy did not
sample never get here: ``training`` selects the sampled ones first. Suffix ``_M``: the M sampled
tokens of a micro-batch. ``old_logprobs_M`` are of the policy that the ratio is taken to: the one
that sampled, or the one from before the update (decoupled PPO).
"""

from __future__ import annotations

import torch
from torch import Tensor

from forage.algorithms.loss.aggregation import sequence_means, sequence_sums

Metrics = dict[str, Tensor]


def clipped_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate with separate bounds, and a floor for bad tokens that became likely.

    Sources: https://arxiv.org/abs/1707.06347 (equation 7), https://arxiv.org/abs/2503.14476
    (clip-higher), https://arxiv.org/abs/1912.09729 (dual clip: with a negative advantage A the
    gain is at least ``dual_clip`` * A).
    """
    ratio_M = torch.exp(logprobs_M - old_logprobs_M)
    gain_M, is_clipped_M = _clipped_gain(ratio_M, advantages_M, clip_low, clip_high)
    metrics = {"loss/clip_fraction": is_clipped_M.float()}
    if dual_clip is not None:
        floor_M = torch.where(advantages_M < 0, dual_clip * advantages_M, float("-inf"))
        metrics["loss/dual_clip_fraction"] = (gain_M < floor_M).float()
        gain_M = torch.maximum(gain_M, floor_M)
    return -gain_M, metrics


def gspo_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    sequence_of_M: Tensor,
    num_sequences_here: int,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate with one ratio a sequence: the geometric mean of its tokens' ratios.

    Given token by token (GSPO-token), so that advantages may differ within a sequence; the mean
    over a sequence's tokens is GSPO's loss of it. Source: https://arxiv.org/abs/2507.18071,
    equations 5, 7 and 13.
    """
    log_ratio_M = logprobs_M - old_logprobs_M
    means_S = sequence_means(log_ratio_M.detach(), sequence_of_M, num_sequences_here)
    # The value is the sequence's ratio, the gradient the token's own.
    ratio_M = torch.exp(means_S[sequence_of_M] + logprobs_M - logprobs_M.detach())
    gain_M, is_clipped_M = _clipped_gain(ratio_M, advantages_M, clip_low, clip_high)
    return -gain_M, {"loss/clip_fraction": is_clipped_M.float()}


def cispo_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted by a clipped ratio: no token loses its gradient, some have it bounded.

    ``clip_low`` 1 leaves the lower side free. Source: https://arxiv.org/abs/2506.13585, equations
    4 and 5.
    """
    ratio_M = torch.exp(logprobs_M.detach() - old_logprobs_M)
    weight_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    metrics = {"loss/clip_fraction": (weight_M != ratio_M).float()}
    return -weight_M * advantages_M * logprobs_M, metrics


def reinforce_loss(
    logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor
) -> tuple[Tensor, Metrics]:
    """REINFORCE, weighted by the (constant) probability ratio to the old policy.

    The gradient is ``-ratio * advantage * grad log p``; where the ratio is 1 this is the estimator
    of Williams, 1992 (https://doi.org/10.1007/BF00992696).
    """
    ratio_M = torch.exp(logprobs_M.detach() - old_logprobs_M)
    return -ratio_M * advantages_M * logprobs_M, {}


def likelihood_protection(
    logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, part_of_M: Tensor
) -> tuple[Tensor, Metrics]:
    """LLDS: how much likelihood the tokens of good actions have lost, where the action lost some.

    ``part_of_M`` numbers what the gate looks at, turns or whole episodes: the loss is
    max(0, old - new) at tokens whose advantage is not negative, in parts whose sum of old - new
    over such tokens is above 0. Source: https://arxiv.org/abs/2512.04220 (LLDS; its first version
    gates episodes, its second single actions).
    """
    is_good_M = advantages_M >= 0
    lost_M = torch.where(is_good_M, old_logprobs_M - logprobs_M, 0.0)
    num_parts = int(part_of_M.max()) + 1 if len(part_of_M) else 0
    lost_by_part = sequence_sums(lost_M.detach(), part_of_M, num_parts)
    is_gated_M = (lost_by_part > 0)[part_of_M] & (lost_M.detach() > 0)
    loss_M = torch.where(is_gated_M, lost_M, 0.0)
    return loss_M, {
        "loss/protection": loss_M.detach(),
        "loss/protected_fraction": is_gated_M.float(),
    }


def _clipped_gain(
    ratio_M: Tensor, advantages_M: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The lesser of the free and the clipped gain, and where the clipped one is it."""
    gain_M = ratio_M * advantages_M
    clipped_gain_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_M
    return torch.minimum(gain_M, clipped_gain_M), clipped_gain_M < gain_M

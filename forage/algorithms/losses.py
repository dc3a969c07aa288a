"""Policy-gradient losses: one number a token, and how tokens become the loss of a batch.

Pure tensor functions. Tokens that the policy did not sample never get here: ``training`` selects
the sampled ones first. Suffix ``_M``: the M sampled tokens of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

Metrics = dict[str, Tensor]


def clipped_loss(
    logprobs_M: Tensor,
    sampler_logprobs_M: Tensor,
    advantages_M: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate with separate bounds; the sampler's policy is the old one.

    Loss a token [M], and the share of tokens that clipping holds back. Sources:
    https://arxiv.org/abs/1707.06347 (equation 7), https://arxiv.org/abs/2503.14476 (clip-higher).
    """
    ratio_M = torch.exp(logprobs_M - sampler_logprobs_M)
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain_M, clipped_gain_M = ratio_M * advantages_M, clipped_M * advantages_M
    is_clipped_M = clipped_gain_M < gain_M
    return -torch.minimum(gain_M, clipped_gain_M), {"loss/clip_fraction": is_clipped_M.float()}


def reinforce_loss(
    logprobs_M: Tensor, sampler_logprobs_M: Tensor, advantages_M: Tensor
) -> tuple[Tensor, Metrics]:
    """REINFORCE, weighted by the (constant) probability ratio to the policy that sampled.

    Loss a token [M]. The gradient is ``-ratio * advantage * grad log p``; at staleness 0 the ratio
    is 1 and this is the estimator of Williams, 1992 (https://doi.org/10.1007/BF00992696).
    """
    ratio_M = torch.exp(logprobs_M.detach() - sampler_logprobs_M)
    return -ratio_M * advantages_M * logprobs_M, {}


def token_mean(loss_M: Tensor, num_sampled_tokens: int) -> Tensor:
    """The micro-batch's share of the mean over every sampled token of the whole batch."""
    return loss_M.sum() / num_sampled_tokens


def sequence_mean(
    loss_M: Tensor, sequence_of_M: Tensor, num_sequences_here: int, num_sequences: int
) -> Tensor:
    """The micro-batch's share of the mean over sequences of their mean over sampled tokens.

    ``sequence_of_M`` numbers the sequences of the micro-batch from 0. Source: GRPO's 1/|o_i|,
    https://arxiv.org/abs/2402.03300, equation 3.
    """
    zeros_S = torch.zeros(num_sequences_here, dtype=loss_M.dtype, device=loss_M.device)
    sums_S = zeros_S.index_add(0, sequence_of_M, loss_M)
    counts_S = zeros_S.index_add(0, sequence_of_M, torch.ones_like(loss_M))
    return (sums_S / counts_S.clamp(min=1)).sum() / num_sequences


def mismatch_metrics(logprobs_M: Tensor, sampler_logprobs_M: Tensor) -> Metrics:
    """How far trainer and sampler disagree about the sampled tokens.

    ``policy/kl`` is the k3 estimate of KL(sampler || trainer), http://joschu.net/blog/kl-approx.html.
    """
    log_ratio_M = logprobs_M - sampler_logprobs_M
    return {
        "policy/logprob_diff_max": log_ratio_M.abs(),
        # expm1, because exp(x) - 1 of a tiny difference is rounding and nothing else.
        "policy/kl": torch.expm1(log_ratio_M) - log_ratio_M,
    }

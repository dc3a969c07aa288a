"""How the losses of tokens become the loss of a batch.

Each function gives a micro-batch's share: its sum over the count of the whole batch, so that the
shares of all micro-batches, on however many ranks, add up to the same loss. Pure tensor functions.
``sequence_of_M`` numbers the sequences of a micro-batch, whose sequences are always whole.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(loss_M: Tensor, num_sampled_tokens: int) -> Tensor:
    """The share of the mean over every sampled token of the batch.

    A long episode weighs more than a short one. Source: DAPO, https://arxiv.org/abs/2503.14476,
    equation 12.
    """
    return loss_M.sum() / num_sampled_tokens


def sequence_mean(
    loss_M: Tensor, sequence_of_M: Tensor, num_sequences_here: int, num_sequences: int
) -> Tensor:
    """The share of the mean over sequences of their mean over sampled tokens.

    Source: GRPO's 1/|o_i|, https://arxiv.org/abs/2402.03300, equation 3.
    """
    return sequence_means(loss_M, sequence_of_M, num_sequences_here).sum() / num_sequences


def sequence_sum(loss_M: Tensor, num_sequences: int) -> Tensor:
    """The share of the mean over sequences of their sum over sampled tokens.

    The gradient of an expected return is this one: https://doi.org/10.1007/BF00992696.
    """
    return loss_M.sum() / num_sequences


def constant(loss_M: Tensor, num_sequences: int, constant_tokens: int) -> Tensor:
    """``sequence_sum`` over a constant instead of over a length, so that no length is favoured.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    return loss_M.sum() / (num_sequences * constant_tokens)


def sequence_sums(values_M: Tensor, sequence_of_M: Tensor, num_sequences: int) -> Tensor:
    """The sum of each sequence's tokens [S]."""
    zeros_S = torch.zeros(num_sequences, dtype=values_M.dtype, device=values_M.device)
    return zeros_S.index_add(0, sequence_of_M, values_M)


def sequence_means(values_M: Tensor, sequence_of_M: Tensor, num_sequences: int) -> Tensor:
    """The mean of each sequence's tokens [S]; 0 where it has none."""
    sums_S = sequence_sums(values_M, sequence_of_M, num_sequences)
    counts_S = sequence_sums(torch.ones_like(values_M), sequence_of_M, num_sequences)
    return sums_S / counts_S.clamp(min=1)

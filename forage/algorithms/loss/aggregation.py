"""How the losses of tokens become the loss of a batch.

Each function gives a micro-batch's share: its sum over the count of the whole batch, so that the
shares of all micro-batches, on however many ranks, add up to the same loss. Pure tensor functions.
``sequence_of_M`` numbers the sequences of a micro-batch, whose sequences are always whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from forage.settings import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Batch, Tokens


class TokenMean(Frozen):
    """The mean over all sampled tokens."""

    kind: Literal["token_mean"] = "token_mean"

    def share(self, loss_M: Tensor, tokens: Tokens, batch: Batch) -> Tensor:
        """The micro-batch's share of the loss of ``batch``; so for each of these kinds."""
        return token_mean(loss_M, batch.num_sampled_tokens)


class SequenceMean(Frozen):
    """The mean over episodes of their mean over sampled tokens."""

    kind: Literal["sequence_mean"] = "sequence_mean"

    def share(self, loss_M: Tensor, tokens: Tokens, batch: Batch) -> Tensor:
        num_here = tokens.num_sequences
        return sequence_mean(loss_M, tokens.sequence_of_M, num_here, batch.num_sequences)


class SequenceSum(Frozen):
    """The mean over episodes of their sum over sampled tokens."""

    kind: Literal["sequence_sum"] = "sequence_sum"

    def share(self, loss_M: Tensor, tokens: Tokens, batch: Batch) -> Tensor:
        return sequence_sum(loss_M, batch.num_sequences)


class Constant(Frozen):
    """The sum over all tokens, over the number of episodes times a constant."""

    kind: Literal["constant"] = "constant"
    tokens: int = Field(ge=1)
    """Tokens that an episode may write, for example environment.max_tokens."""

    def share(self, loss_M: Tensor, tokens: Tokens, batch: Batch) -> Tensor:
        return constant(loss_M, batch.num_sequences, self.tokens)


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
    zeros_S = values_M.new_zeros(num_sequences)
    return zeros_S.index_add(0, sequence_of_M, values_M)


def sequence_means(values_M: Tensor, sequence_of_M: Tensor, num_sequences: int) -> Tensor:
    """The mean of each sequence's tokens [S]; 0 where it has none."""
    sums_S = sequence_sums(values_M, sequence_of_M, num_sequences)
    counts_S = sequence_sums(values_M.new_ones(values_M.shape), sequence_of_M, num_sequences)
    return sums_S / counts_S.clamp(min=1)

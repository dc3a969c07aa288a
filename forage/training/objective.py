"""The loss of a micro-batch as the settings compose it: policy term, leash, entropy, protection.

Joins what ``algorithms`` computes. It sees sampled tokens only, and gives a micro-batch's share of
the loss of the whole batch; and what a step measures of its losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

import torch
from torch import Tensor

from forage.algorithms.diagnostics import mismatch
from forage.algorithms.loss.kl import bounded
from forage.batch import Batch, Metrics, Rows, Sequences, Tokens
from forage.config.algorithm_config import AlgorithmConfig
from forage.training.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Objective:
    """What one optimizer step minimises."""

    algorithm: AlgorithmConfig
    policy: TokenLogprobs
    temperature: float
    version: int
    kl_coefficient: float

    def share(self, rows: Rows, batch: Batch) -> tuple[Tensor, tuple[Metrics, Tensor]]:
        """A micro-batch's share of the loss, its metrics per token, and its log-probabilities."""
        logprobs_M, entropy_M = self.policy(
            rows.packed,
            rows.is_sampled_N,
            self.temperature,
            has_entropy_gradient=self.algorithm.entropy_coefficient > 0,
        )
        tokens = rows.tokens.moved(logprobs_M.device, self.version)
        loss_M, metrics = token_losses(
            self.algorithm, logprobs_M, entropy_M, tokens, self.kl_coefficient
        )
        metrics |= {"policy/entropy": entropy_M.detach(), "policy/staleness": tokens.staleness_M}
        loss = self.algorithm.aggregate.share(loss_M, tokens, batch)
        return loss, (metrics, logprobs_M.detach())


def token_losses(
    algorithm: AlgorithmConfig,
    logprobs_M: Tensor,
    entropy_M: Tensor,
    tokens: Tokens,
    kl_coefficient: float,
) -> tuple[Tensor, Metrics]:
    """Every term of the loss, a token each [M]; the correction's weights go to the policy's."""
    loss_M, metrics = algorithm.loss.policy_loss(logprobs_M, tokens)
    if algorithm.early_stop_ratio is not None:
        metrics["loss/ratio"] = bounded(logprobs_M - tokens.old_logprobs_M).exp().detach()
    loss_M = loss_M * tokens.weights_M
    if algorithm.sequence_mask is not None:
        mask_M = algorithm.sequence_mask.mask(logprobs_M, tokens)
        loss_M = loss_M * mask_M
        metrics["loss/masked_fraction"] = 1 - mask_M
    if algorithm.entropy_coefficient:
        loss_M = loss_M - algorithm.entropy_coefficient * entropy_M
    if (kl := algorithm.kl) is not None:
        references = tokens.reference_logprobs_M, tokens.old_logprobs_M
        kl_M = kl.estimate(logprobs_M, *references)
        metrics["kl/reference"] = kl_M.detach()
        if kl.place == "loss":
            loss_M = loss_M + kl_coefficient * kl_M
    if (protection := algorithm.likelihood_protection) is not None:
        lost_M, more = protection.protect(logprobs_M, tokens)
        loss_M = loss_M + protection.coefficient * lost_M
        metrics |= more
    return loss_M, metrics


_NO_MISMATCH = mismatch(torch.zeros(0), torch.zeros(0), Sequences(torch.zeros(0).long(), 0))


def compare(batch: Batch, logprobs: Sequence[Tensor]) -> dict[str, float]:
    """How the trainer's log-probabilities differ from the sampler's, over the whole batch."""
    if not batch.rows:
        return _NO_MISMATCH
    tokens = [rows.tokens.moved(logprobs[0].device) for rows in batch.rows]
    firsts = list(accumulate((each.sequences.count for each in tokens), initial=0))
    numbers = [t.sequences.number_of_M + first for t, first in zip(tokens, firsts, strict=False)]
    sampler_M = torch.cat([each.sampler_logprobs_M for each in tokens])
    sequences = Sequences(torch.cat(numbers), firsts[-1])
    return mismatch(torch.cat(list(logprobs)), sampler_M, sequences)


def merge(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over a step's optimizer steps; comparisons of policies are the first one's."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    return {
        name: updates[0][name]
        if name in _NO_MISMATCH
        else fmean(metrics[name] for metrics in updates if name in metrics)
        for name in names
    }

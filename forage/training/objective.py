"""The loss of a micro-batch as the settings compose it: policy term, leash, entropy, protection.

Joins the pure functions of ``algorithms`` to the config. It sees sampled tokens only, and gives a
micro-batch's share of the loss of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forage.algorithms.loss.aggregation import constant, sequence_mean, sequence_sum, token_mean
from forage.algorithms.loss.kl import kl_estimate
from forage.algorithms.loss.losses import (
    Metrics,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    likelihood_protection,
    reinforce_loss,
)
from forage.algorithms.packing import sequence_numbers
from forage.batch import Batch, Rows
from forage.config.algorithm_config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a micro-batch says of its M sampled tokens, on the trainer's device."""

    sampler_logprobs_M: Tensor
    old_logprobs_M: Tensor
    reference_logprobs_M: Tensor
    weights_M: Tensor
    advantages_M: Tensor
    versions_M: Tensor
    turn_of_M: Tensor
    sequence_of_M: Tensor
    num_sequences: int

    @staticmethod
    def of(rows: Rows, device: torch.device) -> Tokens:
        chosen = rows.is_sampled_N
        return Tokens(
            sampler_logprobs_M=rows.logprobs_N[chosen].to(device),
            old_logprobs_M=rows.old_logprobs_N[chosen].to(device),
            reference_logprobs_M=rows.reference_logprobs_N[chosen].to(device),
            weights_M=rows.weights_N[chosen].to(device),
            advantages_M=rows.advantages_N[chosen].to(device),
            versions_M=rows.versions_N[chosen].to(device),
            turn_of_M=rows.turns_N[chosen].to(device),
            sequence_of_M=sequence_numbers(rows.packed)[chosen].to(device),
            num_sequences=len(rows.packed.starts_S1) - 1,
        )


def token_losses(
    algorithm: AlgorithmConfig,
    logprobs_M: Tensor,
    entropy_M: Tensor,
    tokens: Tokens,
    kl_coefficient: float,
) -> tuple[Tensor, Metrics]:
    """Every term of the loss, a token each [M]; the correction's weights go to the policy's."""
    loss_M, metrics = _policy_losses(algorithm, logprobs_M, tokens)
    loss_M = loss_M * tokens.weights_M
    if algorithm.entropy_coefficient:
        loss_M = loss_M - algorithm.entropy_coefficient * entropy_M
    if algorithm.kl.coefficient:
        kl_M = kl_estimate(logprobs_M, tokens.reference_logprobs_M, algorithm.kl.form)
        metrics["kl/reference"] = kl_M.detach()
        if algorithm.kl.place == "loss":
            loss_M = loss_M + kl_coefficient * kl_M
    protection = algorithm.likelihood_protection
    if protection.coefficient:
        part_of_M = tokens.turn_of_M if protection.gate == "turn" else tokens.sequence_of_M
        lost_M, more = likelihood_protection(
            logprobs_M, tokens.old_logprobs_M, tokens.advantages_M, part_of_M
        )
        loss_M = loss_M + protection.coefficient * lost_M
        metrics |= more
    return loss_M, metrics


def aggregate(algorithm: AlgorithmConfig, loss_M: Tensor, tokens: Tokens, batch: Batch) -> Tensor:
    """The micro-batch's share of the loss of ``batch``, by the batch's global counts."""
    match algorithm.aggregate:
        case "token_mean":
            return token_mean(loss_M, batch.num_sampled_tokens)
        case "sequence_mean":
            return sequence_mean(
                loss_M, tokens.sequence_of_M, tokens.num_sequences, batch.num_sequences
            )
        case "sequence_sum":
            return sequence_sum(loss_M, batch.num_sequences)
        case "constant":
            assert algorithm.constant_tokens is not None, "the config asks for it"
            return constant(loss_M, batch.num_sequences, algorithm.constant_tokens)


def _policy_losses(
    algorithm: AlgorithmConfig, logprobs_M: Tensor, tokens: Tokens
) -> tuple[Tensor, Metrics]:
    old_M, advantages_M = tokens.old_logprobs_M, tokens.advantages_M
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "clipped":
            return clipped_loss(logprobs_M, old_M, advantages_M, low, high, algorithm.dual_clip)
        case "gspo":
            sequence_of_M, num_here = tokens.sequence_of_M, tokens.num_sequences
            return gspo_loss(logprobs_M, old_M, advantages_M, sequence_of_M, num_here, low, high)
        case "cispo":
            return cispo_loss(logprobs_M, old_M, advantages_M, low, high)
        case "reinforce":
            return reinforce_loss(logprobs_M, old_M, advantages_M)

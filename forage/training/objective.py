"""The loss of a micro-batch as the settings compose it: policy term, leash, entropy, protection.

Joins what ``algorithms`` computes. It sees sampled tokens only, and gives a micro-batch's share of
the loss of the whole batch.
"""

from __future__ import annotations

from torch import Tensor

from forage.algorithms.loss.kl import bounded
from forage.algorithms.loss.tokens import Metrics, Tokens
from forage.config.algorithm_config import AlgorithmConfig


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

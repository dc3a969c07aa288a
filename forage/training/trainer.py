"""One optimizer step on one batch.

Owns the model's gradients, the optimizer and its schedule. It knows advantages and masks, not
rewards, questions or engines; the lock it is given keeps samplers away while weights change.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forage import attention
from forage.algorithms.losses import (
    clipped_loss,
    mismatch_metrics,
    reinforce_loss,
    sequence_mean,
    token_mean,
)
from forage.config import AlgorithmConfig, TrainerConfig
from forage.training.gradients import accumulate
from forage.training.logprobs import token_logprobs
from forage.types import Batch, Rows


class Trainer:
    """Holds the policy's weights and improves them, one batch at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
    ) -> None:
        attention.install(model)
        self.model = model
        self.version = 0
        """Optimizer steps taken: the policy version of the weights as they are."""
        self._config = config
        self._algorithm = algorithm
        self._temperature = temperature
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )

    def step(self, batch: Batch, weights_lock: AbstractContextManager[object]) -> dict[str, float]:
        """Accumulate the gradient of the whole batch, then update the weights once.

        Losses are divided by the batch's global counts, so micro-batches change nothing. Returns
        metrics by name; a batch without rows updates nothing.
        """
        learning_rate = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        shares = accumulate(self.model, [partial(self._loss, rows, batch) for rows in batch.rows])
        sums: dict[str, float] = {}
        largest = 0.0
        for loss, metrics in shares:
            largest = max(largest, metrics.pop("policy/logprob_diff_max").max().item())
            sums["loss/total"] = sums.get("loss/total", 0.0) + loss
            for name, values_M in metrics.items():
                sums[name] = sums.get(name, 0.0) + values_M.sum().item() / batch.num_sampled_tokens
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        if not math.isfinite(grad_norm.item()):
            raise FloatingPointError(
                f"the gradient's norm is {grad_norm.item()} at policy version {self.version}; "
                "lower trainer.learning_rate, or look at the last episodes in the records"
            )
        if batch.rows:
            with weights_lock:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return sums | {
            "policy/logprob_diff_max": largest,
            "optimizer/grad_norm": grad_norm.item(),
            "optimizer/learning_rate": learning_rate,
        }

    def _learning_rate(self) -> float:
        warmup = self._config.warmup_steps
        return self._config.learning_rate * min(1.0, (self.version + 1) / max(warmup, 1))

    def _loss(self, rows: Rows, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm = self._algorithm
        device = next(self.model.parameters()).device
        logprobs_M, entropy_M = token_logprobs(
            self.model, rows.packed, rows.is_sampled_N, self._temperature
        )
        sampler_M = rows.logprobs_N[rows.is_sampled_N].to(device)
        advantages_M = rows.advantages_N[rows.is_sampled_N].to(device)
        if algorithm.loss == "clipped":
            loss_M, metrics = clipped_loss(
                logprobs_M, sampler_M, advantages_M, algorithm.clip_low, algorithm.clip_high
            )
        else:
            loss_M, metrics = reinforce_loss(logprobs_M, sampler_M, advantages_M)
        if algorithm.aggregate == "token_mean":
            loss = token_mean(loss_M, batch.num_sampled_tokens)
        else:
            sequence_of_M = _sequence_of_tokens(rows)[rows.is_sampled_N].to(device)
            num_here = len(rows.packed.starts_S1) - 1
            loss = sequence_mean(loss_M, sequence_of_M, num_here, batch.num_sequences)
        staleness_M = self.version - rows.versions_N[rows.is_sampled_N].float()
        metrics |= mismatch_metrics(logprobs_M.detach(), sampler_M)
        return loss, metrics | {"policy/entropy": entropy_M, "policy/staleness": staleness_M}


def _sequence_of_tokens(rows: Rows) -> Tensor:
    lengths = torch.tensor(rows.packed.starts_S1).diff()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

"""The critic of PPO: a model of the policy's family with a head of one number, and its optimizer.

Its value at a sampled token is the return that it expects before that token is chosen, computed at
the position that predicts the token.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forage import attention
from forage.algorithms.credit.estimator import CriticConfig
from forage.algorithms.credit.gae import explained_variance, value_loss
from forage.algorithms.loss.aggregation import token_mean
from forage.batch import Batch, Packed, Rows
from forage.training.gradients import accumulate, means
from forage.training.logprobs import hidden_before


class Critic(nn.Module):
    """A causal model without its vocabulary: hidden states, and a value head that starts at 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        attention.install(model)
        base = model.base_model
        assert isinstance(base, PreTrainedModel), "a causal model has a base without the head"
        self.base = base
        parameter = next(base.parameters())
        self.head = nn.Linear(
            base.config.hidden_size, 1, device=parameter.device, dtype=parameter.dtype
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, packed: Packed, is_wanted_N: Tensor) -> Tensor:
        """The value before each wanted token [M], float32."""
        return self.head(hidden_before(self.base, packed, is_wanted_N))[:, 0].float()


class CriticTrainer:
    """Holds the critic's weights and trains them on returns, one batch at a time."""

    def __init__(self, critic: Critic, config: CriticConfig) -> None:
        self.critic = critic
        self.num_updates = 0
        self.config = config
        learnt = [weight for weight in critic.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            learnt, lr=config.learning_rate, weight_decay=config.weight_decay
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on the clipped squared error, mean over the batch's sampled tokens."""
        config = self.config
        rate = config.learning_rate * min(1.0, (self.num_updates + 1) / max(config.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        shares = accumulate(self.critic, [partial(self._loss, rows, batch) for rows in batch.rows])
        grad_norm = nn.utils.clip_grad_norm_(self.critic.parameters(), config.max_grad_norm).item()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the norm of the critic's gradient is {grad_norm} at its update "
                f"{self.num_updates}; lower algorithm.advantage.critic.learning_rate"
            )
        if batch.rows:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        explained = 0.0  # how well the values from before the step predicted the returns
        if batch.rows:
            values = [rows.values_N[rows.is_sampled_N] for rows in batch.rows]
            returns = [rows.returns_N[rows.is_sampled_N] for rows in batch.rows]
            explained = explained_variance(torch.cat(values), torch.cat(returns))
        return {
            "critic/loss": sum(loss for loss, _ in shares),
            "critic/grad_norm": grad_norm,
            "critic/learning_rate": rate,
            "critic/explained_variance": explained,
            **means([report for _, report in shares], batch.num_sampled_tokens),
        }

    def _loss(self, rows: Rows, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen = rows.is_sampled_N
        values_M = self.critic.values(rows.packed, chosen)
        old_values_M = rows.values_N[chosen].to(values_M.device)
        returns_M = rows.returns_N[chosen].to(values_M.device)
        loss_M, metrics = value_loss(values_M, old_values_M, returns_M, self.config.value_clip)
        return token_mean(loss_M, batch.num_sampled_tokens), metrics

"""The settings of ``trainer``: the shape of a step, the optimizer and the cadence of the loop.

``run_config.py`` hangs them under its root; the loss is ``algorithm``'s.
"""

from __future__ import annotations

from pydantic import Field

from forage.settings import Frozen


class TrainerConfig(Frozen):
    """Batch shape, optimizer and cadence of the loop.

    A step's groups are learnt in ``num_mini_batches`` optimizer steps, ``num_epochs`` times over.
    """

    num_steps: int = Field(default=100, ge=1)
    questions_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_tokens_per_micro_batch: int = Field(default=16_384, ge=256)
    num_mini_batches: int = Field(default=1, ge=1)
    num_epochs: int = Field(default=1, ge=1)
    checkpoint_every: int = Field(default=50, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)

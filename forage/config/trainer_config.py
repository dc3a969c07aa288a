"""The settings of ``trainer``: batch sizes, optimizer, checkpoints."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from forage.settings import Frozen


class TrainerConfig(Frozen):
    """Batch sizes, optimizer and checkpoint schedule."""

    num_steps: int = Field(default=100, ge=1)
    """Number of training steps."""
    questions_per_step: int = Field(default=8, ge=1)
    """Questions per step."""
    group_size: int = Field(default=8, ge=1)
    """Episodes per question."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """AdamW's learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    final_learning_rate_ratio: float = Field(default=1.0, ge=0, le=1)
    """Final share of the learning rate, which decays linearly; 1: constant."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm; larger gradients are clipped."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Consecutive non-finite gradients that are skipped; one more ends the run."""
    max_tokens_per_micro_batch: int = Field(default=16_384, ge=256)
    """Maximum tokens per micro-batch; does not change gradients."""
    micro_batches_at_once: int | None = Field(default=None, ge=1)
    """Micro-batches computed in parallel on a CPU; null: chosen by measurement."""
    num_mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a step's groups."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over a step's groups."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of most recent checkpoints to keep."""
    checkpoint_in_background: bool = False
    """Write checkpoints from a copy in host memory while training continues."""
    checkpoint_url: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9+.-]*://.")
    """Remote directory for copies of checkpoints and records, for example s3://bucket/run."""

    @model_validator(mode="after")
    def _copies_outlive_the_run(self) -> Self:
        if self.checkpoint_url is not None and self.checkpoint_url.startswith("memory:"):
            raise ValueError(
                f"trainer.checkpoint_url is {self.checkpoint_url}, the run's own memory, so "
                "copies there are lost when the run ends; name persistent storage, such as s3:// "
                "or file://"
            )
        return self

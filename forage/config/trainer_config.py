"""The settings of ``trainer``: the shape of a step, the optimizer and the cadence of the loop."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from forage.settings import Frozen


class TrainerConfig(Frozen):
    """Batch shape, optimizer and cadence of the loop."""

    num_steps: int = Field(default=100, ge=1)
    """Steps of the loop."""
    questions_per_step: int = Field(default=8, ge=1)
    """Questions of a step."""
    group_size: int = Field(default=8, ge=1)
    """Episodes of a question."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """The rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate grows from 0."""
    final_learning_rate_ratio: float = Field(default=1.0, ge=0, le=1)
    """The share of the rate in the last step, to which it falls in a line; 1: it stays."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The norm that the gradient is clipped to."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Updates in a row without a finite gradient that are left out; one more ends the run."""
    max_tokens_per_micro_batch: int = Field(default=16_384, ge=256)
    """Tokens of a micro-batch at most; it changes no gradient."""
    micro_batches_at_once: int | None = Field(default=None, ge=1)
    """Micro-batches that a CPU learns at once, sharing its cores; null: what the model suits."""
    num_mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps that a step's groups are split over."""
    num_epochs: int = Field(default=1, ge=1)
    """How often a step's groups are learnt."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints that are kept, the newest."""
    checkpoint_in_background: bool = False
    """Write a checkpoint from a copy in host memory while training goes on."""
    checkpoint_url: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9+.-]*://.")
    """A directory, for example s3://bucket/run, that checkpoints and records are copied to."""

    @model_validator(mode="after")
    def _copies_outlive_the_run(self) -> Self:
        if self.checkpoint_url is not None and self.checkpoint_url.startswith("memory:"):
            raise ValueError(
                f"trainer.checkpoint_url is {self.checkpoint_url}, the memory of the run itself: "
                "copies there are lost with it; name a store that outlives it, such as s3:// or "
                "file://"
            )
        return self

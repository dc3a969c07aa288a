"""The settings of ``sentinel``: what an alarm does, and the thresholds of the signs of a collapse.

``watch/sentinel.py`` watches. docs/sentinel.md explains each sign.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forage.settings import Frozen, kind_or


class SentinelConfig(Frozen):
    """What is taken for the signs of a collapse, whatever is done then."""

    window: int = Field(default=8, ge=1)
    """Steps whose median is what is normal."""
    patience: int = Field(default=2, ge=1)
    """Steps beyond a limit after which there is an alarm."""
    likelihood_drop: float = Field(default=0.02, gt=0)
    """Nats a token by which correct episodes may become less likely."""
    surprise_growth: float = Field(default=2.0, gt=1)
    """By how much the surprise at correct episodes may be multiplied."""
    min_entropy: float = Field(default=0.001, ge=0)
    """The lowest entropy, in nats a token."""
    entropy_growth: float = Field(default=3.0, gt=1)
    """By how much the entropy may be multiplied."""
    entropy_rise: float = Field(default=0.1, ge=0)
    """Nats a token by which the entropy may rise, whatever it is multiplied by."""
    grad_norm_growth: float = Field(default=5.0, gt=1)
    """By how much the norm of the gradient may be multiplied."""
    max_logprob_diff: float | None = Field(default=None, gt=0)
    """Nats per token by which sampler and trainer may differ; null: by type and staleness."""
    max_misranked: float = Field(default=0.3, gt=0, le=1)
    """The highest share of pairs in which a wrong answer earns more than a right."""
    format_breaks_rise: float = Field(default=0.2, gt=0, le=1)
    """How far the share of broken formats may rise."""
    repetition_rise: float = Field(default=0.2, gt=0, le=1)
    """How far the repetition within turns may rise."""
    repeated_searches_rise: float = Field(default=0.25, gt=0, le=1)
    """How far the share of repeated searches may rise."""
    empty_answers_rise: float = Field(default=0.25, gt=0, le=1)
    """How far the share of empty answers may rise."""
    searches_drop: float = Field(default=0.5, gt=0, le=1)
    """The share of the searches that a question needs that may go."""


class WarnOrStop(SentinelConfig):
    """Says in the log that a collapse is ahead (warn), or ends the run (stop)."""

    kind: Literal["warn", "stop"] = "warn"


class RollBack(SentinelConfig):
    """Goes back to a checkpoint from before the trouble, with a smaller step."""

    kind: Literal["roll_back"] = "roll_back"
    rate_factor: float = Field(default=0.5, gt=0, lt=1)
    """What a rollback leaves of the learning rate."""
    max_rollbacks: int = Field(default=3, ge=1)
    """Rollbacks before the run ends."""


SentinelKind = Annotated[WarnOrStop | RollBack, Field(discriminator="kind"), kind_or("warn")]

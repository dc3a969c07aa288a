"""The settings of ``sentinel``: thresholds of the signs of a collapse, and what an alarm does.

``run_config.py`` hangs them under its root; ``training/sentinel.py`` watches.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forage.settings import Frozen


class SentinelConfig(Frozen):
    """What is taken for the signs of a collapse, and what is done then (docs/sentinel.md)."""

    action: Literal["off", "warn", "stop", "roll_back"] = "warn"
    window: int = Field(default=8, ge=1)
    patience: int = Field(default=2, ge=1)
    likelihood_drop: float = Field(default=0.02, gt=0)
    surprise_growth: float = Field(default=2.0, gt=1)
    min_entropy: float = Field(default=0.001, ge=0)
    entropy_growth: float = Field(default=3.0, gt=1)
    grad_norm_growth: float = Field(default=5.0, gt=1)
    max_misranked: float = Field(default=0.3, gt=0, le=1)
    format_breaks_rise: float = Field(default=0.2, gt=0, le=1)
    repetition_rise: float = Field(default=0.2, gt=0, le=1)
    repeated_searches_rise: float = Field(default=0.25, gt=0, le=1)
    empty_answers_rise: float = Field(default=0.25, gt=0, le=1)
    searches_drop: float = Field(default=0.5, gt=0, le=1)
    rate_factor: float = Field(default=0.5, gt=0, lt=1)
    max_rollbacks: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        defaults = type(self).model_fields
        dead = [name for name in defaults if name != "action"] if self.action == "off" else []
        if self.action in ("warn", "stop"):
            dead = ["rate_factor", "max_rollbacks"]
        for name in dead:
            if getattr(self, name) != defaults[name].default:
                raise ValueError(
                    f"sentinel.{name} does nothing with sentinel.action: {self.action}; "
                    "remove it, or set another action"
                )
        return self

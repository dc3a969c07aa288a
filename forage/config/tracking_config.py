"""The settings of ``tracking``: experiment trackers that receive a run's metrics."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forage.settings import Frozen

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackingConfig(Frozen):
    """Experiment trackers; the run's own files are always written."""

    trackers: tuple[TrackerName, ...] = ()
    """tensorboard (files in the run), wandb, mlflow, trackio; each needs the extra of its name."""
    project: str = Field(default="forage", min_length=1)
    """Project (or experiment) name in wandb, mlflow and trackio."""
    episodes: int = Field(default=0, ge=0)
    """Episodes per step in the tracker's table; 0: none."""
    artifacts: bool = False
    """Upload the settings and the last checkpoint when the run ends."""

    @property
    def services(self) -> tuple[TrackerName, ...]:
        """All trackers except TensorBoard, which is part of the run's records."""
        return tuple(name for name in self.trackers if name != "tensorboard")

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        for name in ("project", "episodes", "artifacts"):
            if not self.services and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"tracking.{name} has no effect without a service: add wandb, mlflow or "
                    "trackio to tracking.trackers, or remove it"
                )
        return self

"""The settings of ``tracking``: who else gets a run's metrics, beside the files of the run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forage.settings import Frozen

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackingConfig(Frozen):
    """The trackers of a run; its own files are written in any case."""

    trackers: tuple[TrackerName, ...] = ()
    """tensorboard (files of the run), wandb, mlflow, trackio: extras of these names."""
    project: str = Field(default="forage", min_length=1)
    """The project, or experiment, of the run in wandb, mlflow and trackio."""
    episodes: int = Field(default=0, ge=0)
    """Episodes of each step that they show in a table; 0: none."""
    artifacts: bool = False
    """Upload the settings and the last checkpoint to them when the run is over."""

    @property
    def services(self) -> tuple[TrackerName, ...]:
        """All but TensorBoard, which is a part of the run's records."""
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

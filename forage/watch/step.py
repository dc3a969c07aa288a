"""A step of the loop: a value that its phases fill in, one after the other (``train.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from forage.batch import Batch, Credited
from forage.rollout.play.groups import StepGroups
from forage.watch.step_report import PhaseClock


@dataclass(slots=True)
class TrainingStep:
    """The results of a step so far; a run that only records stops after the groups."""

    number: int
    clock: PhaseClock = field(default_factory=PhaseClock)
    groups: StepGroups = field(default_factory=lambda: StepGroups((), ()))
    """Set by play: the step's groups."""
    credited_P: list[list[Credited]] = field(default_factory=list)
    """Set by credit: the learnable episodes of each chosen group, with their advantages."""
    batches: list[Batch] = field(default_factory=list)
    """Set by learn: one batch per optimizer step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The step's metrics; each phase adds its own."""

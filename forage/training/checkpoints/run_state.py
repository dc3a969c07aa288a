"""The state of a run in a checkpoint: its progress, and what identifies run and model."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from forage.errors import UserError
from forage.training.checkpoints.checkpoint_manifest import damaged

STATE = "state.json"


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's progress and identity, as stored in a checkpoint.

    An empty checksum or id is not compared.
    """

    num_steps_done: int
    seed: int
    record_offsets: dict[str, int]
    baseline: float | None = None
    """The running baseline of the advantages; None for estimators without one."""
    settings: str = ""
    """A checksum of the settings that the run's episodes depend on."""
    position: int | None = None
    """The number of questions used so far; None if the run replays recorded episodes."""
    run_id: str = ""
    tokenizer: str = ""
    """The tokenizer's checksum, as in the records."""
    model_type: str = ""
    """The architecture's name in transformers."""
    base: str = ""
    """A checksum of the base of adapters, or of the KL reference (``base_weights.py``)."""
    replayed: str = ""
    """A checksum of the replayed episodes; empty if the run plays its own."""

    def check_same_run(self, own: RunState, checkpoint: Path) -> None:
        """Raises ``UserError`` if ``own``, the state a run would save now, is another run's."""
        if self.seed != own.seed:
            raise UserError(
                f"{checkpoint} was made with seed {self.seed}, but the config has {own.seed}: set "
                f"seed={self.seed} to continue"
            )
        if _differ(self.run_id, own.run_id):
            raise UserError(
                f"{checkpoint} belongs to another run ({self.run_id}) than its directory "
                f"({own.run_id}): move it away, and resume its run in its own directory"
            )
        if _differ(self.model_type, own.model_type):
            raise UserError(
                f"{checkpoint} has the model type {self.model_type}, but model.path has "
                f"{own.model_type}; set model.path as in that run, or train into a new output_dir"
            )
        if _differ(self.tokenizer, own.tokenizer):
            raise UserError(
                f"{checkpoint} has the tokenizer {self.tokenizer}, but model.path has "
                f"{own.tokenizer}; set model.path as in that run, or train into a new output_dir"
            )
        if _differ(self.replayed, own.replayed):
            raise UserError(
                f"up to its step, {checkpoint} was trained on different episodes from those of "
                "--replay; name the files that the run started with, in the same order, or train "
                "into a new output_dir"
            )
        self.check_base(own.base, checkpoint)

    def check_base(self, own: str, checkpoint: Path) -> None:
        """Raises ``UserError`` if ``own``, the checksum of the current base, differs."""
        if _differ(self.base, own):
            raise UserError(
                f"{checkpoint} was trained with other base weights ({self.base}) than model.path "
                f"has now ({own}), but its adapters or algorithm.kl depend on them; restore them, "
                "or train into a new output_dir"
            )


def read_state(checkpoint: Path) -> RunState:
    """Reads the run's state from a checkpoint; raises ``DamagedCheckpointError``."""
    try:
        row = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return RunState(**{f.name: row[f.name] for f in fields(RunState)})
    except Exception as error:  # readers raise all kinds of errors for a damaged file
        raise damaged(checkpoint, error) from error


def _differ(then: str, now: str) -> bool:
    return bool(then and now) and then != now

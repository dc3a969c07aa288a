"""What a checkpoint says of its run: where it stood, and which run of which model it is."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from forage.errors import UserError
from forage.training.checkpoints.checkpoint_manifest import damaged

STATE = "state.json"


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint holds besides weights: steps done, the run's seed, lengths of the records.

    What an older checkpoint does not say is None or empty here, and is not compared.
    """

    num_steps_done: int
    seed: int
    record_offsets: dict[str, int]
    baseline: float | None = None
    """The advantages' running baseline, None for estimators without one."""
    settings: str = ""
    """A checksum of what its episodes were played with."""
    position: int | None = None
    """How many questions of the order its steps have asked; None where they were recorded ones."""
    run_id: str = ""
    tokenizer: str = ""
    """The tokenizer's checksum, as the records name it."""
    model_type: str = ""
    """The architecture, as transformers names it."""
    base: str = ""
    """A checksum of the weights under adapters or at the end of a leash (``base_weights.py``)."""
    replayed: str = ""
    """A checksum of the episodes that it was learnt from; empty where they were its own."""

    def check_same_run(self, own: RunState, checkpoint: Path) -> None:
        """Raise ``UserError`` where ``own``, the state that a run would save now, is another's."""
        if self.seed != own.seed:
            raise UserError(
                f"{checkpoint} was made with seed {self.seed}, the config says {own.seed}: set "
                f"seed={self.seed} to go on"
            )
        if _differ(self.run_id, own.run_id):
            raise UserError(
                f"{checkpoint} is of another run ({self.run_id}) than the directory that it lies "
                f"in ({own.run_id}): move it away, and resume its run where that was written"
            )
        if _differ(self.model_type, own.model_type):
            raise UserError(
                f"{checkpoint} is of another model: it is a {self.model_type}, and model.path a "
                f"{own.model_type}; set model.path as in that run, or train into a new output_dir"
            )
        if _differ(self.tokenizer, own.tokenizer):
            raise UserError(
                f"{checkpoint} was made with another tokenizer ({self.tokenizer}) than that of "
                f"model.path ({own.tokenizer}), whose tokens stand for other text; set model.path "
                "as in that run, or train into a new output_dir"
            )
        if _differ(self.replayed, own.replayed):
            raise UserError(
                f"{checkpoint} was learnt from other episodes than those of --replay up to its "
                "step: name the files that the run began with, in their order, or train into a "
                "new output_dir"
            )
        self.check_base(own.base, checkpoint)

    def check_base(self, own: str, checkpoint: Path) -> None:
        """Raise ``UserError`` where ``own``, the base that there is now, is another one."""
        if _differ(self.base, own):
            raise UserError(
                f"{checkpoint} was trained over other weights ({self.base}) than those that are in "
                f"model.path now ({own}): its adapters, or the leash of algorithm.kl, belong to "
                "the others; put these back, or train into a new output_dir"
            )


def read_state(checkpoint: Path) -> RunState:
    """What a checkpoint holds besides weights; raises ``DamagedCheckpointError``."""
    try:
        row = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return RunState(**{f.name: row[f.name] for f in fields(RunState) if f.name in row})
    except Exception as error:  # readers raise all kinds of errors for a damaged file
        raise damaged(checkpoint, error) from error


def _differ(then: str, now: str) -> bool:
    return bool(then and now) and then != now

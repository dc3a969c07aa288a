"""The checkpoints of one run: what is saved beside the weights, and which one a run goes on from.

``checkpoint.py`` writes and reads one; this one knows the run's records and running baseline, which
have to be as they were when the weights were.
"""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from forage.config.run_config import RunConfig, to_yaml
from forage.records import RunRecords
from forage.training.checkpoint import (
    RunState,
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    set_damaged_aside,
)
from forage.training.checkpoint_manifest import DamagedCheckpointError
from forage.training.credit import Credit
from forage.training.trainer_ranks import AnyTrainer

LOG = logging.getLogger(__name__)


class Savepoints:
    """Saves a run and brings it back: weights, optimizers, records and the running baseline."""

    def __init__(
        self,
        config: RunConfig,
        trainer: AnyTrainer,
        tokenizer: PreTrainedTokenizerFast,
        records: RunRecords,
        credit: Credit,
    ) -> None:
        self._config, self._trainer, self._tokenizer = config, trainer, tokenizer
        self._records, self._credit = records, credit

    def save(self, num_steps_done: int) -> None:
        """Write a checkpoint, and keep the newest ``trainer.keep_checkpoints`` of them."""
        offsets, baseline = self._records.offsets(), self._credit.baseline
        state = RunState(num_steps_done, self._config.seed, offsets, baseline)
        config = self._config
        num_kept = config.trainer.keep_checkpoints
        save_checkpoint(config.output_dir, self._trainer, self._tokenizer, state, num_kept)

    def resume(self) -> int:
        """The step to start with: that of the newest checkpoint, 0 where there is none.

        A damaged one is set aside, loudly, for the one before it; raises ``UserError`` where it is
        the only one.
        """
        out = self._config.output_dir
        (out / "config.yaml").write_text(to_yaml(self._config), encoding="utf-8")
        while (checkpoint := latest_checkpoint(out)) is not None:
            try:
                start = self.load(checkpoint)
            except DamagedCheckpointError as error:
                if len(checkpoints(out)) == 1:
                    raise
                LOG.error("%s. Going on from the one before it", error)
                set_damaged_aside(checkpoint)
            else:
                LOG.info("resuming after step %d from %s", start, checkpoint)
                return start
        self._records.truncate_to({})
        return 0

    def load(self, checkpoint: Path) -> int:
        """Weights, records and the baseline as they were; gives the steps done."""
        state = load_checkpoint(checkpoint, self._trainer)
        state.check_seed(self._config.seed, checkpoint)
        self._records.truncate_to(state.record_offsets)
        self._credit.baseline = state.baseline
        return state.num_steps_done

"""The checkpoints of one run: what is saved beside the weights, and which one a run goes on from.

``checkpoint.py`` writes and reads one, ``remote_copies.py`` keeps copies; this one knows
the run's records and running baseline, which have to be as they were when the weights were.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from forage.config.run_config import RunConfig, to_yaml
from forage.data.order import StepQuestions
from forage.environment.remembered import memory_of
from forage.records import RunRecords, write_whole_text
from forage.training.base_weights import digest_of_base
from forage.training.checkpoints.checkpoint import (
    begin_checkpoint,
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    read_ahead,
    set_damaged_aside,
)
from forage.training.checkpoints.checkpoint_manifest import DamagedCheckpointError
from forage.training.checkpoints.remote_copies import SETTINGS_FILE, copies_of
from forage.training.checkpoints.run_id import run_id_of
from forage.training.checkpoints.run_state import RunState
from forage.training.credit import Credit
from forage.training.ranks.trainer_ranks import AnyTrainer
from forage.types import Episode, TokenizerId

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
        tokenizer_id: TokenizerId,
        questions: StepQuestions | None,
        learns: bool = True,
        replayed: Callable[[int], str] | None = None,
    ) -> None:
        """Where the run does not learn, ``save`` writes its records to the disk and no more.

        ``questions`` are None where the steps are recorded ones; then ``replayed`` gives a checksum
        of the first so many of them.
        """
        self._replayed = replayed
        self._learns = learns
        self._config, self._trainer, self._tokenizer = config, trainer, tokenizer
        self._records, self._credit, self._questions = records, credit, questions
        self._tokenizer_sha256 = tokenizer_id.sha256
        self._elsewhere = copies_of(config)
        self._memory = memory_of(config.environment)  # now: a file of a prompt may change
        self._base = digest_of_base(config)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self.ahead: dict[str, Episode] = {}
        """Episodes of later steps that were over at the checkpoint that was loaded, by key."""
        self.finished_ahead: Callable[[], Mapping[str, Episode]] = dict
        """Gives the episodes that are over now and not learnt yet, by key."""

    async def save(self, num_steps_done: int) -> None:
        """Write a checkpoint, and keep the newest ``trainer.keep_checkpoints`` of them.

        In the background only the copy is made before this returns. Raises ``UserError``, also for
        the one before. Who is stopped in it waits for its end: two that are written at once would
        sweep away each other's files.
        """
        saving = asyncio.ensure_future(self._save(num_steps_done))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await asyncio.gather(saving, return_exceptions=True)  # the next one says what is wrong
            raise

    async def _save(self, num_steps_done: int) -> None:
        self._records.sync()
        if not self._learns:
            return
        await asyncio.to_thread(self.wait)
        config, ahead = self._config, self.finished_ahead()
        run = (config.output_dir, self._trainer, self._tokenizer, self._state(num_steps_done))
        in_background = config.trainer.checkpoint_in_background
        options = (config.trainer.keep_checkpoints, in_background, ahead, self._memory)
        write = await begin_checkpoint(*run, *options)
        self._writing = self._thread.submit(self._finish, write)
        if not in_background:
            await asyncio.to_thread(self.wait)

    def _state(self, num_steps_done: int) -> RunState:
        config, questions, tokenizer = self._config, self._questions, self._tokenizer_sha256
        return RunState(
            num_steps_done,
            config.seed,
            self._records.offsets(),
            self._credit.baseline,
            _played_with(config, tokenizer),
            None if questions is None else questions.position(num_steps_done),
            run_id_of(config.output_dir),
            tokenizer,
            self._trainer.model.config.model_type,
            self._base,
            "" if self._replayed is None else self._replayed(num_steps_done),
        )

    def check(self) -> None:
        """Raise the ``UserError`` of a checkpoint that could not be written meanwhile."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Return when no checkpoint is being written; raises as ``check`` does."""
        writing = self._writing
        if writing is None:
            return
        try:
            writing.result()
        finally:
            if self._writing is writing:  # until then whoever else waits waits for it, too
                self._writing = None

    def close(self) -> None:
        """Wait for the last one; raises as ``check`` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _finish(self, write: Callable[[], Path]) -> None:
        checkpoint = write()
        if self._elsewhere is not None:
            self._elsewhere.put(checkpoint, self._config.trainer.keep_checkpoints)

    def newest(self) -> Path | None:
        """The newest checkpoint of the run, written to its end."""
        self.wait()
        return latest_checkpoint(self._config.output_dir)

    def restore(self, checkpoint: Path | None) -> int:
        """Everything as it was at ``checkpoint``, None for the newest; gives the steps done."""
        return self._resume() if checkpoint is None else self._load(checkpoint)

    def _resume(self) -> int:
        """The step to start with: that of the newest checkpoint, 0 where there is none.

        A damaged one is set aside, loudly, for the one before it; raises ``UserError`` where it is
        the only one.
        """
        out, settings = self._config.output_dir, to_yaml(self._config)
        while (checkpoint := latest_checkpoint(out)) is not None:
            try:
                start = self._load(checkpoint)
            except DamagedCheckpointError as error:
                if len(checkpoints(out)) == 1:
                    text = "There is none: put a whole copy there, or train into a new output_dir"
                    raise DamagedCheckpointError(f"{error}. {text}") from error
                LOG.error("%s. Going on from the one before it", error)
                set_damaged_aside(checkpoint)
            else:
                write_whole_text(out / SETTINGS_FILE, settings)  # now: the checkpoint fits them
                LOG.info("resuming after %d steps from %s", start, checkpoint)
                return start
        write_whole_text(out / SETTINGS_FILE, settings)
        self._go_back(0, {})
        return 0

    def _load(self, checkpoint: Path) -> int:
        """Weights, records and the baseline as they were; gives the steps done."""
        self.wait()
        state = load_checkpoint(checkpoint, self._trainer)
        now = self._state(state.num_steps_done)
        state.check_same_run(now, checkpoint)
        self._go_back(state.num_steps_done, state.record_offsets)
        self._credit.baseline = state.baseline
        if self._questions is not None:
            self._questions.resume_at(state.num_steps_done, state.position)
        self.ahead = read_ahead(checkpoint) if state.settings == now.settings else {}
        return state.num_steps_done

    def _go_back(self, num_steps_done: int, record_offsets: Mapping[str, int]) -> None:
        """The records are as they were; what came later is forgotten elsewhere, too."""
        self._records.truncate_to(record_offsets)
        if self._elsewhere is not None:
            self._elsewhere.go_back(num_steps_done, record_offsets)


def _played_with(config: RunConfig, tokenizer_sha256: str) -> str:
    """A checksum of what makes an episode what it is; addresses are none of it."""
    sections = dict.fromkeys(("seed", "data", "environment", "reward", "rollout"), True)
    found = {"search": {"topk", "noise"}}
    settings = config.model_dump_json(include=sections | found)
    return sha256(f"{settings}{tokenizer_sha256}".encode()).hexdigest()

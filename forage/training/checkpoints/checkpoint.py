"""Checkpoints: everything that the next step depends on, written whole or not at all.

A checkpoint is a directory: a Hugging Face model, or the adapters alone where only they are
trained; ``forage.json`` (``remembered.py``); ``optimizer`` (what the optimizers remember, a
distributed checkpoint of torch's, a file a rank); ``critic*.safetensors`` (the trained weights of a
critic, if there is one); ``progress.json`` (the trainer's numbers); ``ahead.jsonl`` (episodes of
later steps that were over); ``state.json`` (``run_state.py``: the step, which gives schedule and
sampling seeds; the position in the questions; the running baseline; the lengths of the records; of
which run it is); and last ``manifest.json``, with the checksums of all the others. It is written
beside its final place, flushed to the disk, and moved there in one rename, so that a killed run or
a full disk leaves the previous checkpoint as it was. Any number of ranks goes on from what any
other number wrote.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedTokenizerFast

from forage.environment.template import MEMORY_FILE
from forage.episode_json import EpisodeRecord
from forage.errors import UserError
from forage.records import METRICS_FILE, read_episodes, write_records
from forage.training.checkpoints.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpointError,
    check_manifest,
    damaged,
    write_manifest,
)
from forage.training.checkpoints.disk_errors import is_of_the_disk, mend
from forage.training.checkpoints.run_state import STATE, RunState, read_state
from forage.training.checkpoints.saved_weights import write_config
from forage.training.ranks.trainer_ranks import AnyTrainer
from forage.types import Episode

LOG = logging.getLogger(__name__)

CHECKPOINTS_DIR = "checkpoints"
_PREFIX = "step_"
_PARTIAL = ".partial"
_DAMAGED = ".damaged"
_PROGRESS, _AHEAD = "progress.json", "ahead.jsonl"


async def begin_checkpoint(
    run_dir: Path,
    trainer: AnyTrainer,
    tokenizer: PreTrainedTokenizerFast,
    state: RunState,
    num_kept: int,
    is_copied: bool = True,
    ahead: Mapping[str, Episode] = MappingProxyType({}),
    memory: str | None = None,
) -> Callable[[], Path]:
    """Begin a checkpoint; what this gives ends it, on any thread. Both raise ``UserError``.

    The oldest beyond ``num_kept`` are removed then. ``is_copied``: of a copy in host memory, so
    that training may go on meanwhile. ``ahead`` are episodes of later steps, by their keys.
    ``memory`` is what ``remembered.py`` has to say of the model.
    """
    final = checkpoint_path(run_dir, state.num_steps_done)
    folder = final.parent
    unfinished = final.with_name(final.name + _PARTIAL)
    with _the_last_one_intact(run_dir, final):
        _sweep(folder)
        unfinished.mkdir(parents=True)
        tokenizer.save_pretrained(unfinished)  # now: it encodes for the loop, on the loop's thread
        if memory is not None:
            (unfinished / MEMORY_FILE).write_text(memory, encoding="utf-8")
        write_config(trainer.model, unfinished)
        # On a thread, since ranks may be busy with the weights of a server that came late.
        write_trainer = await asyncio.to_thread(trainer.writer, unfinished, is_copied)
        progress = json.dumps(await asyncio.to_thread(trainer.progress))

    def write() -> Path:
        with _the_last_one_intact(run_dir, final):
            write_trainer()
            (unfinished / _PROGRESS).write_text(progress, encoding="utf-8")
            if ahead:
                rows = (EpisodeRecord(state.num_steps_done, key, ahead[key]) for key in ahead)
                write_records(unfinished / _AHEAD, rows)
            (unfinished / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
            write_manifest(unfinished)
            flush_folder(unfinished)
            if final.exists():
                _set_aside(final)
            unfinished.rename(final)
            _flush(folder)  # the new one is there before an older one goes
        _remove_oldest(run_dir, num_kept)
        return final

    return write


@contextmanager
def _the_last_one_intact(run_dir: Path, final: Path) -> Iterator[None]:
    """An error removes the unfinished checkpoint, and one of the disk becomes a ``UserError``."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(final.with_name(final.name + _PARTIAL), ignore_errors=True)
        if not is_of_the_disk(error):
            raise  # a rank that has died, or a bug
        last = latest_checkpoint(run_dir)
        advice = mend(error).capitalize()
        left = f"there is no earlier one. {advice} and begin again in a new output_dir"
        if last is not None:
            left = f"the previous one, {last}, is intact. {advice} and continue with --resume"
        raise UserError(f"cannot write the checkpoint {final}: {error}; {left}") from error


def load_checkpoint(checkpoint: Path, trainer: AnyTrainer) -> RunState:
    """Restore weights and optimizers.

    Raises ``DamagedCheckpointError``, before anything is changed, and ``UserError`` for the
    checkpoint of another model or algorithm.
    """
    check_manifest(checkpoint)
    state = read_state(checkpoint)
    try:
        progress = json.loads((checkpoint / _PROGRESS).read_text(encoding="utf-8"))
    except Exception as error:  # readers raise all kinds of errors for a damaged file
        raise damaged(checkpoint, error) from error
    trainer.load(checkpoint, progress)
    return state


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by the steps done, oldest first."""
    paths = checkpoints_dir(run_dir).glob(f"{_PREFIX}*")
    found = {step: path for path in paths if (step := step_of(path.name)) is not None}
    return {step: found[step] for step in sorted(found) if found[step].is_dir()}


def finish_renames(run_dir: Path) -> None:
    """Give whole checkpoints their names where a run was killed just before it did.

    By then one that was written for the same step before may have been set aside.
    """
    for unfinished in list(checkpoints_dir(run_dir).glob(f"{_PREFIX}*{_PARTIAL}")):
        final = unfinished.with_suffix("")
        if step_of(final.name) is not None and not final.exists():
            with suppress(DamagedCheckpointError):
                check_manifest(unfinished)
                unfinished.rename(final)
                _flush(final.parent)


def has_unfinished(run_dir: Path) -> bool:
    """Whether a run was killed while it wrote a checkpoint."""
    return any(checkpoints_dir(run_dir).glob(f"{_PREFIX}*{_PARTIAL}"))


def is_checkpoint(folder: Path) -> bool:
    """Whether one of ours lies there, whole or damaged; others have manifests of other kinds."""
    return (folder / MANIFEST).is_file() and (folder / _PROGRESS).is_file()


def step_of(name: str) -> int | None:
    """The steps done at the checkpoint of this name; None for an unfinished one or one's own."""
    match = re.fullmatch(rf"{_PREFIX}(\d+)", name)
    return None if match is None else int(match[1])


def set_damaged_aside(checkpoint: Path) -> None:
    """Rename a checkpoint that cannot be read, so that it is none from now on; nothing is lost."""
    aside = checkpoint.with_name(checkpoint.name + _DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def checkpoints_dir(run_dir: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run_dir / CHECKPOINTS_DIR


def checkpoint_path(run_dir: Path, num_steps_done: int) -> Path:
    """Where the checkpoint after so many steps is, or will be."""
    return checkpoints_dir(run_dir) / f"{_PREFIX}{num_steps_done:06d}"


def read_ahead(checkpoint: Path) -> dict[str, Episode]:
    """Episodes of later steps that were over when the checkpoint was written, by their keys."""
    path = checkpoint / _AHEAD
    return (
        {str(record.arm): record.episode for record in read_episodes(path)} if path.exists() else {}
    )


def drop_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; from the first moment on it does not count as one."""
    _set_aside(checkpoint)
    _sweep(checkpoint.parent)


def has_run(run_dir: Path) -> bool:
    """Whether a training run was begun there: it has a checkpoint or a row of metrics."""
    metrics = run_dir / METRICS_FILE
    has_rows = metrics.exists() and metrics.stat().st_size > 0
    return latest_checkpoint(run_dir) is not None or has_rows


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    return next(reversed(checkpoints(run_dir).values()), None)


def _remove_oldest(run_dir: Path, num_kept: int) -> None:
    """Remove all but the newest; one that cannot be removed costs its room, and no run."""
    for old in list(checkpoints(run_dir).values())[:-num_kept]:
        try:
            _set_aside(old)
        except OSError as error:
            LOG.warning("cannot remove the old checkpoint %s (%s); it stays", old, error.strerror)
    _sweep(checkpoints_dir(run_dir))


def _set_aside(directory: Path) -> None:
    """Rename a checkpoint, so that it is none from now on; its files are deleted later."""
    directory.rename(directory.with_name(f"{directory.name}.old{_PARTIAL}"))


def _sweep(folder: Path) -> None:
    """Remove checkpoints that were set aside, and what a killed run left half-written.

    Of a checkpoint that was moved to another place and linked, the link goes.
    """
    for left_over in folder.glob(f"*{_PARTIAL}"):
        if left_over.is_symlink():
            left_over.unlink()
        shutil.rmtree(left_over, ignore_errors=True)


def flush_folder(directory: Path) -> None:
    """Return when the files and the directory's entries are on the disk."""
    for path in [*directory.rglob("*"), directory]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

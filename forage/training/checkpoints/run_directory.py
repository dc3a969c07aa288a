"""The output directory of a run, before anything is opened: may it begin there, or go on?

A newer checkpoint at ``trainer.checkpoint_url`` is fetched here. ``savepoints.py`` then loads the
newest, and cuts the records back to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from forage.config.run_config import RunConfig
from forage.errors import UserError, refuse_unwritable
from forage.records import read_metrics
from forage.training.checkpoints.checkpoint import (
    checkpoints_dir,
    finish_renames,
    has_run,
    has_unfinished,
    latest_checkpoint,
)
from forage.training.checkpoints.remote_copies import SETTINGS_FILE, copies_of
from forage.training.checkpoints.run_id import held_alone, run_id_of, write_run_id

LOG = logging.getLogger(__name__)


@contextmanager
def run_directory(config: RunConfig, resume: bool) -> Iterator[None]:
    """Have ``output_dir`` for this process alone while the body trains there.

    Raises ``UserError`` where a run is or none can be written, where there is none to resume or
    its checkpoints are lost, and where the copies at ``trainer.checkpoint_url`` are another's.
    """
    out, elsewhere = config.output_dir, copies_of(config)
    has_copies = elsewhere is not None and bool(elsewhere.steps())
    if not resume:
        _refuse_to_begin(config, has_copies)
    elif not (has_copies or has_run(out)):
        raise _nothing_to_resume(out)
    refuse_unwritable(out, "output_dir")
    with held_alone(out):
        if resume:
            finish_renames(out)
            if elsewhere is not None:
                elsewhere.bring_back(out)
            _refuse_to_lose_records(config)
        of_copies = elsewhere.run_id() if elsewhere is not None and has_copies else ""
        write_run_id(out, run_id_of(out) or of_copies or uuid4().hex)
        yield


def earlier_settings(config: RunConfig) -> Path:
    """The ``config.yaml`` of a run that goes on, fetched where it is only elsewhere.

    It may be nowhere. Raises ``UserError``.
    """
    path, elsewhere = config.output_dir / SETTINGS_FILE, copies_of(config)
    if elsewhere is not None and not path.exists():
        elsewhere.fetch_file(SETTINGS_FILE, config.output_dir)
    return path


def _refuse_to_begin(config: RunConfig, has_copies: bool) -> None:
    out, url = config.output_dir, config.trainer.checkpoint_url
    if has_copies:
        raise UserError(
            f"trainer.checkpoint_url already holds a run ({url}); go on with --resume, or set "
            "another address"
        )
    if has_run(out):
        raise UserError(
            f"{out} already holds a run; go on with --resume, or set another output_dir"
        )


def _refuse_to_lose_records(config: RunConfig) -> None:
    """Without a checkpoint a run begins at step 0 and cuts its records: say so, or refuse."""
    out, every = config.output_dir, config.trainer.checkpoint_every
    if latest_checkpoint(out) is not None:
        return
    if not has_run(out):
        raise _nothing_to_resume(out)
    rows = read_metrics(out)
    num_steps = int(rows[-1]["step"]) + 1 if rows else 0
    was_writing_its_first = num_steps < 2 * every and has_unfinished(out)
    # The process may have ended between the records of a step and its checkpoint.
    if num_steps > every and not was_writing_its_first:
        raise UserError(
            f"{out} has the records of {num_steps} steps, and no checkpoint in "
            f"{checkpoints_dir(out)}, which has one from step {every} on "
            "(trainer.checkpoint_every): put that folder back, or train into a new output_dir"
        )
    LOG.warning(
        "%s has no checkpoint: the run begins again at step 0, and the records of %d steps are cut",
        out,
        num_steps,
    )


def _nothing_to_resume(out: Path) -> UserError:
    return UserError(f"{out} holds no run to resume; leave --resume out")

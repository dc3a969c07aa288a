"""Identifies the run that owns an output directory, and locks it against other processes.

The id is created once. Each checkpoint and ``trainer.checkpoint_url`` store it, so that no run
mistakes another's checkpoints for its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forage.disk.disk_failures import disk_failures
from forage.errors import UserError
from forage.records import lock_alone
from forage.training.checkpoints.checkpoint import checkpoints
from forage.training.checkpoints.checkpoint_manifest import DamagedCheckpointError
from forage.training.checkpoints.run_state import read_state

RUN_ID_FILE = "run_id"
_REMEDY = "free some space there, or choose another output_dir"


@contextmanager
def locked_run_directory(run_dir: Path) -> Iterator[None]:
    """Keeps other processes from training in ``run_dir`` inside the context; raises ``UserError``.

    A new directory is removed again if nothing was written to it.
    """
    path, is_new = run_dir / RUN_ID_FILE, not run_dir.exists()
    with disk_failures(path, _REMEDY):
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        try:
            lock_alone(file.fileno(), path)
        except BlockingIOError:
            raise UserError(
                f"another process trains in {run_dir}: wait for it, or set another output_dir"
            ) from None
        try:
            yield
        finally:
            with suppress(OSError):  # it may have been removed
                if is_new and [*run_dir.iterdir()] == [path]:
                    path.unlink()
                    run_dir.rmdir()


def run_id_of(run_dir: Path) -> str:
    """The id of the run in ``run_dir``; "" if there is none.

    If its file is missing, the newest readable checkpoint provides it.
    """
    path = run_dir / RUN_ID_FILE
    if path.exists() and (found := path.read_text(encoding="utf-8").strip()):
        return found
    for checkpoint in reversed(checkpoints(run_dir).values()):
        with suppress(DamagedCheckpointError):
            return read_state(checkpoint).run_id
    return ""


def write_run_id(run_dir: Path, run_id: str) -> None:
    """Writes the id in place: replacing the file would lose the lock on it."""
    path = run_dir / RUN_ID_FILE
    with disk_failures(path, _REMEDY):
        path.write_text(f"{run_id}\n", encoding="utf-8")

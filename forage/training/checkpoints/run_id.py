"""Whose an output directory is: the id of its run, and the lock that keeps other processes out.

The id is made once. Each checkpoint holds it, and so does ``trainer.checkpoint_url``, so that no
run takes the checkpoints of another for its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forage.errors import UserError, disk_failures
from forage.records import lock_alone
from forage.training.checkpoints.checkpoint import checkpoints
from forage.training.checkpoints.checkpoint_manifest import DamagedCheckpointError
from forage.training.checkpoints.run_state import read_state

RUN_ID_FILE = "run_id"
_REMEDY = "free some space there, or choose another output_dir"


@contextmanager
def held_alone(run_dir: Path) -> Iterator[None]:
    """Keep other processes from training in ``run_dir`` meanwhile; raises ``UserError``.

    A new directory goes again where the body wrote nothing: what it refused leaves no trace.
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
                f"another process trains in {run_dir}: wait for its end, or set another output_dir"
            ) from None
        try:
            yield
        finally:
            with suppress(OSError):  # somebody may have removed it meanwhile
                if is_new and [*run_dir.iterdir()] == [path]:
                    path.unlink()
                    run_dir.rmdir()


def run_id_of(run_dir: Path) -> str:
    """The id of the run in ``run_dir``; "" for none, and for a run of an older Forage.

    Where its file was left behind, the newest checkpoint that can be read has it.
    """
    path = run_dir / RUN_ID_FILE
    if path.exists() and (found := path.read_text(encoding="utf-8").strip()):
        return found
    for checkpoint in reversed(checkpoints(run_dir).values()):
        with suppress(DamagedCheckpointError):
            return read_state(checkpoint).run_id
    return ""


def write_run_id(run_dir: Path, run_id: str) -> None:
    """Write it into the file that is locked, which no other file may replace."""
    path = run_dir / RUN_ID_FILE
    with disk_failures(path, _REMEDY):
        path.write_text(f"{run_id}\n", encoding="utf-8")

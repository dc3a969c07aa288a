"""Writes a folder that is there whole or not at all.

It is written beside its place, flushed to the disk, and moved there in one rename. A disk that
refuses is an error that says what to do about it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forage.errors import UserError
from forage.training.checkpoints.checkpoint import flush_folder
from forage.training.checkpoints.disk_errors import is_of_the_disk, mend


@contextmanager
def written_beside(out: Path) -> Iterator[Path]:
    """A folder to write in, which becomes ``out`` when all is well; raises ``UserError``."""
    out = out.resolve()  # a link stays one, and "." has a name
    folder = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        flush_folder(folder)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    except Exception as error:
        if not is_of_the_disk(error):
            raise
        advice = f"{mend(error)}, or choose another --out"
        raise UserError(f"cannot write {out}: {error}; {advice}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""Writes a folder atomically: it appears complete or not at all.

It is written next to its final path, flushed to disk, and moved there in one rename. A disk error
becomes a message with a remedy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forage.errors import UserError
from forage.training.checkpoints.checkpoint import flush_folder
from forage.training.checkpoints.disk_errors import is_disk_error, remedy_for


@contextmanager
def written_beside(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` if no error occurs; raises ``UserError``."""
    out = out.resolve()  # keeps a link, and gives "." a name
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
        if not is_disk_error(error):
            raise
        advice = f"{remedy_for(error)}, or choose another --out"
        raise UserError(f"cannot write {out}: {error}; {advice}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)

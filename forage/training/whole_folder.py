"""Writes a folder that is there whole or not at all.

It is written beside its place, flushed to the disk, and moved there in one rename. A disk that
refuses is an error that says what to do about it.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forage.errors import UserError
from forage.training.checkpoint import flush_folder, is_of_the_disk

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}


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
        raise UserError(f"cannot write {out}: {error}; {_remedy(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remedy(error: Exception) -> str:
    number = _errno_of(error)
    if number in _FULL:
        return "free some space there, or choose another --out"
    if number in _FORBIDDEN:
        return "choose another --out, where you may write"
    return "look whether that disk works, or choose another --out"


def _errno_of(error: Exception) -> int | None:
    """The system's number of an error; packages in Rust say it in their text alone."""
    if isinstance(error, OSError):
        return error.errno
    said = re.search(r"\(os error (\d+)\)", str(error))
    return None if said is None else int(said[1])

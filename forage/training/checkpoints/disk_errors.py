"""Errors of a disk that refuses to be written, and what one does about them."""

from __future__ import annotations

import errno
import re

from safetensors import SafetensorError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}


def is_of_the_disk(error: Exception) -> bool:
    """Whether the disk refused to be written; packages in Rust say so by errors of their own."""
    return isinstance(error, OSError | SafetensorError) or "(os error " in str(error)


def mend(error: Exception) -> str:
    """What to do about an error of the disk, as the beginning of a sentence."""
    number = _errno_of(error)
    if number in _FULL:
        return "free some space there"
    if number in _FORBIDDEN:
        return "see that you may write there"
    return "look whether that disk is full or failing"  # torch's writer does not say why


def _errno_of(error: Exception) -> int | None:
    """The system's number of an error; packages in Rust and ranks say it in their text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    said = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    return None if said is None else int(said[1] or said[2])

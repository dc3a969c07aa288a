"""Recognises errors of writing to a disk, and knows how to fix them."""

from __future__ import annotations

import errno
import re

from safetensors import SafetensorError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}


def is_disk_error(error: Exception) -> bool:
    """Whether writing to a disk failed; Rust packages raise their own errors for that."""
    return isinstance(error, OSError | SafetensorError) or "(os error " in str(error)


def remedy_for(error: Exception) -> str:
    """How to fix a disk error, as the start of a sentence."""
    number = _errno_of(error)
    if number in _FULL:
        return "free some space there"
    if number in _FORBIDDEN:
        return "check that you have write permission there"
    return "check whether that disk is full or failing"  # torch's writer does not say why


def _errno_of(error: Exception) -> int | None:
    """The error's errno; Rust packages and ranks only mention it in the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    return None if match is None else int(match[1] or match[2])

"""Reads untrusted files: only regular files, each up to a size limit.

Opening a named pipe blocks, a device may be endless, and Python's parsers have no limits. Records,
settings and figures of runs are read through this file.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from forage.errors import UserError


def open_plain(path: Path, what: str = "") -> BinaryIO:
    """Opens a regular file for reading; raises ``UserError`` for anything else.

    ``what``: precedes the path in the message: "the config ".
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"cannot read {what}{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is a pipe, a device or a folder; put a regular file there")
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, max_bytes: int, what: str = "") -> bytes:
    """The content of a regular file; raises ``UserError`` if it is longer than ``max_bytes``."""
    with open_plain(path, what) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(
            f"{path} has more than {max_bytes:,} bytes, the most that Forage reads of it"
        )
    return content


def read_json(path: Path, max_bytes: int) -> Any:
    """The value in a JSON file; raises ``UserError``."""
    content = read_plain(path, max_bytes)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error

"""A file that holds one secret: a server's token, an endpoint's key."""

from __future__ import annotations

import stat
from pathlib import Path

from forage.errors import UserError


def read_secret_file(path: Path, name: str, kind: str) -> str:
    """The text without the space around it; ``name`` says whose file it is, ``kind`` what it holds.

    Raises ``UserError`` for a file that cannot be read, or that everybody may read.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {name} {path}: {error}") from error
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise UserError(f"{path} holds a {kind} and everybody may read it; run: chmod 600 {path}")
    return text.strip()

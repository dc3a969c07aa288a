"""Secrets of users: a server's token, a provider's key; from a file or a variable, never logged.

Every secret is read here, so that each file gets the same check: nobody else may read it. What a
secret may look like is checked by its reader; sending it is ``request.py``'s.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from forage.errors import UserError


def read_secret_file(path: Path, name: str, kind: str) -> str:
    """The text without the space around it; ``name`` says whose file it is, ``kind`` what it holds.

    Raises ``UserError`` for a file that cannot be read, or that everybody may read.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {name} {path}: {error}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise UserError(f"{path} holds a {kind} and everybody may read it; run: chmod 600 {path}")
    return text.strip()


def read_key(
    owner: str,
    file: Path | None,
    variable: str | None,
    environment: Mapping[str, str] | None = None,
) -> SecretStr | None:
    """The key in ``file``, else in the environment's ``variable``; None where neither is given.

    ``owner`` is the section of settings whose ``key_file`` and ``key_variable`` these are. Raises
    ``UserError``, which never shows the key, for one that is not there or cannot be sent.
    """
    if file is not None:
        text, origin = read_secret_file(file, f"{owner}.key_file", "key"), str(file)
    elif variable is not None:
        found = (os.environ if environment is None else environment).get(variable)
        if found is None:
            raise UserError(
                f"the key of {owner} is read from the variable {variable}, which is not set: "
                f"export {variable}, or name a file that holds the key with {owner}.key_file"
            )
        text, origin = found.strip(), f"the variable {variable}"
    else:
        return None
    # It becomes part of a header, which holds neither spaces nor line breaks nor umlauts.
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        what = "holds characters that a key cannot have" if text else "is empty"
        raise UserError(f"{origin} {what}; it must hold the key of {owner} alone")
    return SecretStr(text)

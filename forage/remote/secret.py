"""Secrets of users: the bearer token that server and clients share, a provider's key; never logged.

Every secret is read here, so that each file gets the same check: nobody else may read it. What a
secret may look like is checked by its reader; sending it is ``request.py``'s.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from forage.errors import UserError

VARIABLE = "FORAGE_TOKEN"

# What RFC 6750 lets stand behind "Bearer ".
_LEGAL = re.compile(r"[A-Za-z0-9._~+/-]+=*")


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


def read_token(
    token_file: Path | None = None,
    given: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> SecretStr | None:
    """The token of the file, else the given one, else the environment's; None without any.

    Raises ``UserError`` for two at once, an unreadable file, or a text that is no token.
    """
    if token_file is not None and given is not None:
        raise UserError("--token and --token-file both name a token; leave one of them out")
    if token_file is not None:
        return _checked(read_secret_file(token_file, "the token file", "token"), str(token_file))
    if given is not None:
        return _checked(given, "--token")
    found = environment.get(VARIABLE)
    return None if found is None else _checked(found, VARIABLE)


def is_token(token: SecretStr, authorization: bytes) -> bool:
    """Whether an ``Authorization`` header carries the token.

    Compared in constant time, so that a guess learns nothing from how long it took.
    """
    scheme, _, credentials = authorization.partition(b" ")
    expected = token.get_secret_value().encode("ascii")
    return scheme.lower() == b"bearer" and hmac.compare_digest(credentials.strip(), expected)


def _checked(text: str, source: str) -> SecretStr:
    if not _LEGAL.fullmatch(text):
        what = "is empty" if not text else "holds characters that a bearer token cannot have"
        raise UserError(
            f"the token of {source} {what}; use letters, digits and . _ ~ + / - "
            "(for example from: openssl rand -hex 32)"
        )
    return SecretStr(text)

"""Reads secrets, and never logs them: the bearer token of server and clients, and API keys.

All secrets are read here, so that every file gets the same check: only its owner may read it. The
readers check the form of a secret; ``request.py`` sends it.
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

# The token characters that RFC 6750 allows after "Bearer ".
_LEGAL = re.compile(r"[A-Za-z0-9._~+/-]+=*")


def read_secret_file(path: Path, name: str, kind: str) -> str:
    """The stripped text of a file; ``name``: the setting, ``kind``: the secret, for messages.

    Raises ``UserError`` for a file that cannot be read, or that everyone may read.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {name} {path}: {error}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise UserError(f"{path} contains a {kind} and everyone may read it; run: chmod 600 {path}")
    return text.strip()


def read_key(
    owner: str,
    file: Path | None,
    variable: str | None,
    environment: Mapping[str, str] | None = None,
) -> SecretStr | None:
    """The key in ``file``, otherwise in the environment's ``variable``; None without either.

    ``owner``: the settings section with this ``key_file`` and ``key_variable``. Raises
    ``UserError``, which never shows the key, if it is missing or cannot be sent.
    """
    if file is not None:
        text, origin = read_secret_file(file, f"{owner}.key_file", "key"), str(file)
    elif variable is not None:
        found = (os.environ if environment is None else environment).get(variable)
        if found is None:
            raise UserError(
                f"the key of {owner} is read from the variable {variable}, which is not set: "
                f"export {variable}, or set {owner}.key_file to a file with the key"
            )
        text, origin = found.strip(), f"the variable {variable}"
    else:
        return None
    # The key becomes part of a header, which allows no spaces, line breaks or non-ASCII letters.
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        what = "contains characters that a key cannot have" if text else "is empty"
        raise UserError(f"{origin} {what}; it must contain only the key of {owner}")
    return SecretStr(text)


def read_token(
    token_file: Path | None = None,
    given: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> SecretStr | None:
    """The token in the file, the given token, or the environment's; None if there is none.

    Raises ``UserError`` for two at once, an unreadable file, or an invalid token.
    """
    if token_file is not None and given is not None:
        raise UserError("--token and --token-file both give a token; leave one of them out")
    if token_file is not None:
        return _checked(read_secret_file(token_file, "the token file", "token"), str(token_file))
    if given is not None:
        return _checked(given, "--token")
    found = environment.get(VARIABLE)
    return None if found is None else _checked(found, VARIABLE)


def is_token(token: SecretStr, authorization: bytes) -> bool:
    """Whether an ``Authorization`` header carries the token.

    Compares in constant time, so that the duration reveals nothing about a guess.
    """
    scheme, _, credentials = authorization.partition(b" ")
    expected = token.get_secret_value().encode("ascii")
    return scheme.lower() == b"bearer" and hmac.compare_digest(credentials.strip(), expected)


def _checked(text: str, source: str) -> SecretStr:
    if not _LEGAL.fullmatch(text):
        what = "is empty" if not text else "contains characters that a bearer token cannot have"
        raise UserError(
            f"the token of {source} {what}; use letters, digits and . _ ~ + / - "
            "(for example from: openssl rand -hex 32)"
        )
    return SecretStr(text)

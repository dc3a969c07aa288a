"""The bearer token that server and clients share: from a file or the environment, never logged."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from forage.errors import UserError
from forage.remote.secret import read_secret_file

VARIABLE = "FORAGE_TOKEN"

# What RFC 6750 lets stand behind "Bearer ".
_LEGAL = re.compile(r"[A-Za-z0-9._~+/-]+=*")


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

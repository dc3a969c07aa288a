"""The key of a model endpoint: from a file or a variable that the recipe names, never logged."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import SecretStr

from forage.config.endpoint_config import EndpointConfig
from forage.errors import UserError
from forage.remote.secret_file import read_secret_file


def read_endpoint_key(
    settings: EndpointConfig, environment: Mapping[str, str] = os.environ
) -> SecretStr | None:
    """The key to send, None where none is named; raises ``UserError`` for one that is not there."""
    if settings.key_file is not None:
        return _checked(
            read_secret_file(settings.key_file, "model.endpoint.key_file", "key"),
            f"model.endpoint.key_file ({settings.key_file})",
        )
    if settings.key_variable is None:
        return None
    found = environment.get(settings.key_variable)
    if found is None:
        raise UserError(
            f"model.endpoint.key_variable names {settings.key_variable}, which is not set: export "
            "it, or name a file with model.endpoint.key_file"
        )
    return _checked(found.strip(), f"the variable {settings.key_variable}")


def _checked(text: str, source: str) -> SecretStr:
    # It becomes part of a header, which holds neither spaces nor line breaks nor umlauts.
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        what = "holds characters that a key cannot have" if text else "is empty"
        raise UserError(f"{source} {what}; it must hold the key alone")
    return SecretStr(text)

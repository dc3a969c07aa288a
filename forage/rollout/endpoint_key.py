"""The key of a model endpoint: from a file or a variable that the recipe names, never logged."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from forage.endpoint_config import EndpointConfig
from forage.errors import UserError


def read_endpoint_key(
    settings: EndpointConfig, environment: Mapping[str, str] = os.environ
) -> SecretStr | None:
    """The key to send, None where none is named; raises ``UserError`` for one that is not there."""
    if settings.key_file is not None:
        return _checked(_read(settings.key_file), f"model.endpoint.key_file ({settings.key_file})")
    if settings.key_variable is None:
        return None
    found = environment.get(settings.key_variable)
    if found is None:
        raise UserError(
            f"model.endpoint.key_variable names {settings.key_variable}, which is not set: export "
            "it, or name a file with model.endpoint.key_file"
        )
    return _checked(found.strip(), f"the variable {settings.key_variable}")


def _read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read model.endpoint.key_file {path}: {error}") from error
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise UserError(f"{path} holds a key and everybody may read it; run: chmod 600 {path}")
    return text.strip()


def _checked(text: str, source: str) -> SecretStr:
    # It becomes part of a header, which holds neither spaces nor line breaks nor umlauts.
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        what = "holds characters that a key cannot have" if text else "is empty"
        raise UserError(f"{source} {what}; it must hold the key alone")
    return SecretStr(text)

"""A wrong setting, told to who wrote it: which key, which value, and the nearest key there is.

``run_config.py`` calls this where pydantic refused a tree of settings.
"""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel


def explain(root: type[BaseModel], detail: dict[str, Any]) -> str:
    """One of pydantic's errors about settings of ``root``, as a sentence for who wrote them."""
    location = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {location}{_nearest(root, location)}"
    if detail["type"] == "missing":
        return f"{location} is missing"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return message
    return f"{location}: {message} (got {detail['input']!r})"


def _nearest(root: type[BaseModel], location: str) -> str:
    keys = list(_all_keys(root, ""))
    name = location.rsplit(".", 1)[-1]
    # The right name in the wrong place is likelier than another name in the same place.
    close = [key for key in keys if key.rsplit(".", 1)[-1] == name] or difflib.get_close_matches(
        location, keys, n=1, cutoff=0.6
    )
    return f"; did you mean {close[0]}?" if close else ""


def _all_keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for section in get_args(field.annotation) or (field.annotation,):
            if isinstance(section, type) and issubclass(section, BaseModel):
                keys.extend(_all_keys(section, f"{prefix}{name}."))
    return keys

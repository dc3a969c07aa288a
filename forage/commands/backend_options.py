"""Options made of settings: one for each field of an index's backends, with its sentence.

``forage index`` adds them by group; what they mean together is checked by ``index_command.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from forage.commands.arguments import positive

if TYPE_CHECKING:
    from pydantic import BaseModel

_OPTION = {"query_model": "--query-encoder", "onnx_file": "--onnx"}


def add_settings(group: argparse._ArgumentGroup, models: Mapping[str, type[BaseModel]]) -> None:
    """One option for each field of the settings; its help says which backends read it."""
    names = dict.fromkeys(name for model in models.values() for name in model.model_fields)
    for name in names:
        if name == "kind":
            continue
        fields = {
            backend: model.model_fields[name]
            for backend, model in models.items()
            if name in model.model_fields
        }
        field = next(iter(fields.values()))
        readers = f"{', '.join(fields)}: " if len(models) > 1 else ""
        default = f" (default {field.default})" if field.default not in (None, False) else ""
        value = _value_of([field.annotation for field in fields.values()])
        text = f"{readers}{field.description}{default}"
        group.add_argument(option_of(name), dest=name, help=text, **value)


def _value_of(kinds: list[Any]) -> dict[str, Any]:
    """How argparse reads a field of these types: choices, a switch, a number or a text."""
    parts = [part for kind in kinds for part in _parts(kind)]
    choices = list(dict.fromkeys(part for part in parts if isinstance(part, str)))
    if choices:
        return {"choices": choices + (["none"] if type(None) in parts else [])}
    if bool in parts:
        return {"action": "store_true"}
    if int in parts:
        return {"type": positive}
    return {"type": float, "metavar": "X"} if float in parts else {"metavar": "TEXT"}


def _parts(kind: Any) -> list[Any]:
    """``Literal["a", "b"] | None`` gives ``"a"``, ``"b"`` and None's type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [part for one in get_args(kind) for part in _parts(one)] or [kind]


def option_of(name: str) -> str:
    """How a setting is written on the command line."""
    return _OPTION.get(name, "--" + name.replace("_", "-"))

"""Looks into the models of settings: which section a key holds, and which kinds there are.

A section is one model, or a union of models with a ``kind`` each. What reads, explains and prints
settings asks here, so that no second list of keys is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

Models = Sequence[type[BaseModel]]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value of this type may be: ``Grpo | Rloo | None`` gives both."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def models_at(models: Models, key: str) -> list[type[BaseModel]]:
    """The models of the section that ``key`` holds in any of ``models``; none for a value."""
    found: dict[type[BaseModel], None] = {}
    for model in models:
        if key in model.model_fields:
            found |= dict.fromkeys(models_in(model.model_fields[key].annotation))
    return list(found)


def kinds_of(models: Models) -> dict[str, type[BaseModel]]:
    """The kinds that a section chooses from, by name; none where it is no union."""
    return {
        kind: model
        for model in models
        if "kind" in model.model_fields
        for kind in get_args(model.model_fields["kind"].annotation)
    }

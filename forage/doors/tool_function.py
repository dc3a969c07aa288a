"""Turns a tool into a function whose signature and docstring tell a model how to call it.

TRL reads docstrings in Google's style; MCP servers read annotations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from forage.environment.tools.tool import Tool

Function = TypeVar("Function", bound=Callable[..., Any])

_TYPES = {
    **{"string": str, "integer": int, "number": float, "boolean": bool, "object": dict},
    "null": type(None),
}


def described(call: Function, tool: Tool, is_method: bool = False) -> Function:
    """``call``, which takes ``**arguments``, with the name and the arguments of ``tool``."""
    properties = (tool.shown or tool.parameters).get("properties", {})
    required = tool.parameters.get("required", ())
    meanings = {name: _meaning(name, schema) for name, schema in properties.items()}
    lines = ["", "Args:", *(f"    {name}: {meaning}" for name, meaning in meanings.items())]
    types = {
        name: Annotated[_type_of(schema), Field(description=meanings[name])]
        for name, schema in properties.items()
    }
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name in required else None,
            annotation=annotation,
        )
        for name, annotation in types.items()
    ]
    if is_method:
        parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD))
    call.__name__ = call.__qualname__ = tool.name
    call.__doc__ = "\n".join([tool.description, *(lines if meanings else ())])
    call.__annotations__ = {**types, "return": str}
    vars(call)["__signature__"] = inspect.Signature(parameters, return_annotation=str)
    return call


def given(arguments: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """Drops the arguments that the caller left out, which arrive as None."""
    required = tool.parameters.get("required", ())
    return {k: v for k, v in arguments.items() if v is not None or k in required}


def _meaning(name: str, schema: Mapping[str, Any]) -> str:
    return " ".join(str(schema.get("description") or f"The {name}.").split())


def _type_of(schema: Mapping[str, Any]) -> Any:
    """The annotation from which this schema would be derived."""
    if "anyOf" in schema:
        return reduce(or_, map(_type_of, schema["anyOf"]))
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    kind = schema.get("type", "")
    if isinstance(kind, list):
        return reduce(or_, (_type_of({**schema, "type": one}) for one in kind))
    if kind == "array":
        return list[_type_of(schema["items"])] if "items" in schema else list
    return _TYPES.get(kind, dict)

"""Adds the options of ``forage index`` that come from settings, and refuses unused ones.

The options of the backends come from their settings (``forage.retrieval.index.index``): one per
field, with its description. An option that the chosen backend does not use is an error that names
the backends that do.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from forage.commands.arguments import DTYPES, positive
from forage.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from forage.retrieval.vectors.encoder import EncoderChoice

ENCODER = (
    *("revision", "query_model", "query_revision", "pooling", "query_prefix", "passage_prefix"),
    *("passage_template", "normalise", "max_length", "dtype", "onnx_file"),
)
_OPTION = {"query_model": "--query-encoder", "onnx_file": "--onnx"}


def add_encoder_arguments(group: argparse._ArgumentGroup) -> None:
    def add(name: str, text: str, **how: Any) -> None:
        group.add_argument(name, help=text, **how)

    add("--encoder", "a directory or a hub id", metavar="MODEL")
    add("--revision", "a commit on the hub", metavar="COMMIT")
    text = "a separate encoder for queries, as in DPR"
    add("--query-encoder", text, dest="query_model", metavar="MODEL")
    add("--query-revision", "a commit on the hub", metavar="COMMIT")
    text = "how token vectors are pooled (default: from the model's files or its family)"
    add("--pooling", text, choices=["mean", "cls", "lasttoken", "max"])
    add("--query-prefix", "text to put before each query", metavar="TEXT")
    add("--passage-prefix", "text to put before each passage", metavar="TEXT")
    text = "how to join title and text, with {title} and {text}"
    add("--passage-template", text, metavar="TEXT")
    add("--normalise", "scale vectors to unit length", action=argparse.BooleanOptionalAction)
    add("--max-length", "maximum tokens to read of a text", type=positive)
    text = "refuse passages that are longer than the encoder reads, instead of warning"
    add("--whole-passages", text, action="store_true")
    text = "the encoder's compute type (default: the fastest one with nearly the same vectors)"
    add("--dtype", text, choices=DTYPES)
    text = "compute with this ONNX file of the model (default onnx/model.onnx)"
    how = {"dest": "onnx_file", "nargs": "?", "const": "onnx/model.onnx", "metavar": "FILE"}
    add("--onnx", text, **how)
    add("--trust-remote-code", "run Python code that comes with the model", action="store_true")
    text = "devices that encode passages, for example cuda:0 cuda:1 (default: a GPU if present)"
    add("--device", text, nargs="+", default=[])


def add_settings(group: argparse._ArgumentGroup, models: Mapping[str, type[BaseModel]]) -> None:
    """Adds one option per field of the settings; its help names the backends that use it."""
    for name in _names(models):
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
        group.add_argument(_option_of(name), dest=name, help=text, **value)


def _names(models: Mapping[str, type[BaseModel]]) -> list[str]:
    names = dict.fromkeys(name for model in models.values() for name in model.model_fields)
    return [name for name in names if name != "kind"]


def _value_of(kinds: list[Any]) -> dict[str, Any]:
    """Tells argparse how to read a field of these types: choices, switch, number or string."""
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
    """Splits a type: ``Literal["a", "b"] | None`` becomes ``"a"``, ``"b"`` and None's type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [part for one in get_args(kind) for part in _parts(one)] or [kind]


def _option_of(name: str) -> str:
    return _OPTION.get(name, "--" + name.replace("_", "-"))


def encoder_choice(args: Namespace) -> EncoderChoice:
    from forage.retrieval.vectors.encoder import EncoderChoice

    if args.encoder is None:
        raise UserError(
            "vectors need an encoder: give --encoder a directory or a hub id "
            "(for example intfloat/e5-base-v2)"
        )
    given = {name: getattr(args, name) for name in ENCODER}
    return EncoderChoice(args.encoder, **given, trust_remote_code=args.trust_remote_code)


def settings_of(args: Namespace, backend: str, may_read_less: bool = False) -> Any:
    """The settings of a backend from the options given; raises ``UserError``.

    An option that the backend does not use is an error, unless ``may_read_less`` and another
    backend of the same kind uses it.
    """
    from pydantic import ValidationError

    from forage.retrieval.index.index import BACKENDS

    own = next(models for models in BACKENDS.values() if backend in models)
    given: dict[str, Any] = {}
    for name in fields_of(*BACKENDS):
        value, option = getattr(args, name), _option_of(name)
        if value is None or value is False:
            continue
        readers = [kind for kind, model in own.items() if name in model.model_fields]
        if backend in readers:
            given[name] = None if value == "none" else value
        elif not readers:
            raise UserError(f"{option} has no effect here: the backend is {backend}")
        elif not may_read_less:
            raise UserError(f"{option} is for {', '.join(readers)}, but the backend is {backend}")
    try:
        return own[backend](**given)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"{_option_of(str(wrong['loc'][0]))}: {wrong['msg']}") from error


def fields_of(*groups: str) -> list[str]:
    from forage.retrieval.index.index import BACKENDS

    return [name for group in groups for name in _names(BACKENDS[group])]


def refuse(args: Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        value = getattr(args, name)
        is_given = value is not None and value is not False and value != []
        if is_given or (name == "normalise" and value is False):
            raise UserError(f"{_option_of(name)} has no effect here: {reason}")

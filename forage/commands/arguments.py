"""Arguments that several commands share: a recipe with overrides, an address, kinds, numbers.

``positive``, ``count``, ``port``, ``seconds``, ``not_negative`` and ``local_path`` are each a
``type=`` of argparse: a text in, a value out, or an error that says what is allowed.
"""

from __future__ import annotations

import argparse
import inspect
import math
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from argparse import _SubParsersAction

T = TypeVar("T")

DTYPES = ("float32", "float16", "bfloat16")


def positive(text: str) -> int:
    """A whole number from 1 up."""
    return _whole_number(text, lowest=1)


def count(text: str) -> int:
    """A whole number from 0 up."""
    return _whole_number(text, lowest=0)


def port(text: str) -> int:
    """A TCP port; 0 stands for any that is free."""
    return _whole_number(text, lowest=0, highest=65_535)


def seconds(text: str) -> float:
    """A time above 0."""
    return _time(text, "seconds")


def minutes(text: str) -> float:
    """A time above 0."""
    return _time(text, "minutes")


def _time(text: str, unit: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above 0")
    return value


def not_negative(text: str) -> float:
    """A number from 0 up."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def local_path(text: str) -> Path:
    """A file or directory of this machine; a ``Path`` of an address would lose a slash."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is an address, and a file or a directory is wanted here; a setting names the "
            "address of a model (model.endpoint.url) or of a search server (search.url)"
        )
    return Path(text)


def add_overrides(parser: ArgumentParser) -> None:
    """Settings given as ``key.sub=value``; ``cli`` also collects those that follow an option."""
    text = "settings that replace the recipe's, for example trainer.learning_rate=1e-5"
    words = parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help=text
    )
    vars(words)["completer"] = _keys  # where argcomplete looks for it


def _keys(prefix: str, **_: object) -> list[str]:
    """Settings that a shell offers after the recipe."""
    from forage.config.run_config import RunConfig
    from forage.config.settings_text import all_paths

    return [f"{path}=" for path in all_paths(RunConfig) if path.startswith(prefix)]


def add_config(parser: ArgumentParser) -> None:
    """A recipe, and the settings that replace some of it."""
    text = "the recipe: a file, or the name of one that ships with Forage (see: forage recipes)"
    parser.add_argument("config", type=local_path, metavar="CONFIG.yaml", help=text)
    add_overrides(parser)


def add_vector_options(group: _ArgumentGroup) -> None:
    """How indexes of vectors are opened: the fields of ``OpenOptions``."""
    add = group.add_argument
    add("--device", help="where queries are encoded: cpu, cuda:0 ... (default: a GPU if present)")
    text = "numbers that the encoder computes in (default: the fastest that stays close)"
    add("--dtype", choices=DTYPES, help=text)
    text = "GPUs that hold the vectors (default: none, they stay on disk and in memory)"
    add("--gpus", type=count, nargs="+", default=[], help=text)
    text = "another place of the index's encoder: a directory, or an id of the hub"
    add("--encoder", metavar="MODEL", help=text)
    text = "run Python code that comes with the encoder"
    add("--trust-remote-code", action="store_true", help=text)


def made_of(args: Namespace, kind: Callable[..., T], **others: object) -> T:
    """``kind`` of the arguments that are called as its fields (a list as a tuple), and others."""
    names = [name for name in inspect.signature(kind).parameters if hasattr(args, name)]
    said = {name: getattr(args, name) for name in names}
    lists = {name: tuple(value) for name, value in said.items() if isinstance(value, list)}
    return kind(**(said | lists | others))


def add_address(parser: ArgumentParser, default_port: int) -> None:
    """Where a server listens: on this machine alone unless told otherwise."""
    text = "network address to listen on (default 127.0.0.1, for this machine alone)"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    text = "port to listen on; 0 takes any free one"
    parser.add_argument("--port", type=port, default=default_port, help=text)


def add_kinds(parser: ArgumentParser) -> _SubParsersAction[ArgumentParser]:
    """Makes ``parser`` a command of several kinds, one of which must be named; see ``add_kind``."""
    return parser.add_subparsers(metavar="KIND", title="kinds", required=True)


def add_kind(
    kinds: _SubParsersAction[ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[Namespace], int],
) -> ArgumentParser:
    """The parser of one kind of a command, ``forage data world`` for example, and what it runs."""
    parser = kinds.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run, usage=parser.format_usage)
    return parser


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole_number(text: str, lowest: int, highest: int = 2**63 - 1) -> int:
    if not (text.isdecimal() and lowest <= int(text) <= highest):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {lowest}"
            + (f" to {highest}" if highest < 2**63 - 1 else " up")
        )
    return int(text)

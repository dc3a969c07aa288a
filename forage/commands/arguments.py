"""Reads the arguments of commands: the table in ``commands.toml``, and the types it names.

A type converts a string to a value, or raises an error that says what is allowed.
"""

from __future__ import annotations

import argparse
import inspect
import math
import tomllib
from argparse import ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")


def positive(text: str) -> int:
    """Reads a whole number of at least 1."""
    return _whole_number(text, lowest=1)


def count(text: str) -> int:
    """Reads a whole number of at least 0."""
    return _whole_number(text, lowest=0)


def port(text: str) -> int:
    """Reads a TCP port; 0 means any free one."""
    return _whole_number(text, lowest=0, highest=65_535)


def seconds(text: str) -> float:
    """Reads a positive number of seconds."""
    return _time(text, "seconds")


def minutes(text: str) -> float:
    """Reads a positive number of minutes."""
    return _time(text, "minutes")


def _time(text: str, unit: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a positive number of {unit}")
    return value


def not_negative(text: str) -> float:
    """Reads a number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def local_path(text: str) -> Path:
    """Reads a local path; URLs are refused, since ``Path`` would damage them."""
    if "://" in text:
        raise ArgumentTypeError(
            f"{text} is a URL, but a file or directory is required here; to use a server, set "
            "model.endpoint.url (a model) or search.url (a search server)"
        )
    return Path(text)


def server_address(text: str) -> str:
    """Reads the address of a server, as in ``placement.engine.urls``."""
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # half of an IPv6 address, or a port above the highest
        is_address = False
    if not is_address:
        raise ArgumentTypeError(f"{text!r} is not an address such as http://127.0.0.1:8000")
    return text


def page_url(text: str) -> str:
    """Reads an address that contains ``{title}``, or nothing."""
    if text and "{title}" not in text:
        raise ArgumentTypeError(f"{text!r} must contain {{title}}, the place of the page's title")
    return text


def question_file(text: str) -> Path:
    """Reads the path of a file to write questions to; its suffix determines the form."""
    if Path(text).suffix not in (".jsonl", ".parquet"):
        raise ArgumentTypeError(f"{text!r} must end in .jsonl (Forage) or .parquet (Search-R1)")
    return Path(text)


def reward(text: str) -> float:
    """Reads a number that is not NaN: every episode would pass the bound NaN."""
    value = _number(text)
    if math.isnan(value):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return value


def steps(text: str) -> range:
    """Reads ``3:6`` or ``3``."""
    first, colon, end = text.partition(":")
    if not (first.isdecimal() and (end.isdecimal() or not colon)):
        raise ArgumentTypeError(f"{text!r} is not a range of steps; write FIRST:END, such as 0:10")
    steps = range(int(first), int(end) if colon else int(first) + 1)
    if not steps:
        raise ArgumentTypeError(f"{text!r} contains no step: the end must be above the first")
    return steps


_TYPES = {
    each.__name__: each
    for each in (
        *(Path, positive, count, port, seconds, minutes, not_negative, local_path),
        *(server_address, page_url, question_file, reward, steps),
    )
}


def _read_table() -> dict[str, Any]:
    text = (resources.files("forage.commands") / "commands.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


COMMAND_TABLE = _read_table()
"""The commands of ``commands.toml`` by name."""
_SHARED = COMMAND_TABLE.pop("shared")


def add_listed(parser: _ActionsContainer, arguments: Mapping[str, Any]) -> None:
    """Adds the arguments and groups of a command in ``commands.toml``."""
    for name, listed in arguments.items():
        row = _SHARED[name] if listed == "shared" else listed
        if "help" not in row:
            is_choice = name.startswith("either ")
            group = parser.add_argument_group(name) if not is_choice else None
            add_listed(group or parser.add_mutually_exclusive_group(), row)
            continue
        how = deepcopy(row)  # a parser appends to a default list
        is_setting = how.pop("completes", None) is not None
        if "type" in how:
            how["type"] = _TYPES[how["type"]]
        if how.get("action") == "boolean":
            how["action"] = argparse.BooleanOptionalAction
        action = parser.add_argument(name, **how)
        if is_setting:
            vars(action)["completer"] = _setting_names  # read by argcomplete


def _setting_names(prefix: str, **_: object) -> list[str]:
    from forage.config.run_config import RunConfig
    from forage.config.settings_text import all_paths

    return [f"{path}=" for path in all_paths(RunConfig) if path.startswith(prefix)]


def made_of(args: Namespace, kind: Callable[..., T], **others: object) -> T:
    """Builds ``kind`` from the arguments named like its fields (lists as tuples) and ``others``."""
    names = [name for name in inspect.signature(kind).parameters if hasattr(args, name)]
    given = {name: getattr(args, name) for name in names}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return kind(**(given | lists | others))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole_number(text: str, lowest: int, highest: int = 2**63 - 1) -> int:
    if not (text.isdecimal() and lowest <= int(text) <= highest):
        raise ArgumentTypeError(
            f"{text!r} is not a whole number "
            + (f"from {lowest} to {highest}" if highest < 2**63 - 1 else f"of at least {lowest}")
        )
    return int(text)

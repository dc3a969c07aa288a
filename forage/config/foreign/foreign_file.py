"""Reads what other trainers are started with: shell scripts, YAML, and TRL's calls in Python.

What comes out is flat: their keys, with dots or as flags without dashes, and values as JSON has
them. A shell script is read and never run: its variables are put in where it sets them itself.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from forage.config.config_file import leaves, parse_yaml
from forage.errors import UserError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_][\w.]*)=(.*)$", re.DOTALL)
_REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")
_FLOAT = re.compile(r"^[+-]?\d+(\.\d*)?[eE][+-]?\d+$")


def read_foreign(path: Path) -> dict[str, Any]:
    """Their keys and values, in the order of the file; raises ``UserError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        given = dict(_of_yaml(path, text))
    elif path.suffix == ".py":
        given = _of_python(path, text)
    else:
        given = dict(_of_shell(path, text))
    if not given:
        raise UserError(f"{path} sets nothing: name a shell script, a YAML file or a TRL script")
    return given


def _of_yaml(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no keys")
    flat = _flat(tree)
    for name, value in flat.items():
        yield name, _resolved(value, flat)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Its values by their dotted names, without empty sections."""
    return {
        name: _number(value) if isinstance(value, str) else value
        for name, value in leaves(tree)
        if value != {}
    }


def _resolved(value: Any, flat: Mapping[str, Any]) -> Any:
    """The value that a reference of OmegaConf names; others, also computed ones, stay."""
    for _ in range(len(flat)):  # a circle ends, too
        reference = _REFERENCE.match(value) if isinstance(value, str) else None
        if reference is None or reference.group(1) not in flat:
            break
        value = flat[reference.group(1)]
    return value


def _of_python(path: Path, text: str) -> dict[str, Any]:
    """The keywords of ``GRPOConfig`` and of peft's ``LoraConfig``; what is computed is named so."""
    try:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is no Python: {error}") from error
    given: dict[str, Any] = {}
    for call in calls:
        called = ast.unparse(call.func).rpartition(".")[2]
        prefix = {"GRPOConfig": "", "LoraConfig": "lora_"}.get(called)
        for keyword in call.keywords if prefix is not None else ():
            if keyword.arg is not None:
                name = keyword.arg.removeprefix("lora_")
                given |= _literal(f"lora_{name}" if prefix else keyword.arg, keyword.value)
    return given


def _literal(name: str, written: ast.expr) -> dict[str, Any]:
    """A keyword with its value as JSON has it, or under another name with what computes it."""
    try:
        value = ast.literal_eval(written)
        json.dumps(value)
    except (ValueError, TypeError):
        return {f"{name} (computed)": ast.unparse(written)}
    value = list(value) if isinstance(value, tuple) else value
    return _flat({name: value}) if isinstance(value, dict) else {name: value}


def _of_shell(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Overrides (``a.b=c``) and flags (``--name value``) of all commands and arrays."""
    variables: dict[str, str] = {}
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        line = re.sub(r"^\s*\w+=\(", "", line)  # a list of arguments
        if assignment := _ASSIGNMENT.match(line):
            variables[assignment.group(1)] = _put_in(assignment.group(2).strip("\"'"), variables)
            if "." not in line.partition("=")[0] and " " not in line.strip().partition("=")[2]:
                continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines, which holds no setting
            words = line.split()
        yield from _settings([_put_in(word, variables) for word in words])


def _put_in(text: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found.group(1) or found.group(3)
        return variables.get(name, found.group(2) or found.group(0))

    return _VARIABLE.sub(value, text)


def _settings(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Those of the program that Python runs, or of a line of a list of arguments."""
    if words[:2] == ["ray", "start"]:
        return
    programs = [place for place, word in enumerate(words) if Path(word).name.startswith("python")]
    words = words[programs[-1] + 1 :] if programs else words
    for place, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            following = words[place + 1] if place + 1 < len(words) else "--"
            if not has_value:
                value = "true" if following.startswith(("--", ")", "$", "|", "2>")) else following
            yield name, _number(value.rstrip(")"))
        elif override := _OVERRIDE.match(word):
            name = override.group(1)
            if "." in name or name.islower():  # not a variable of the environment
                yield name, _number(override.group(2))


def _number(text: str) -> Any:
    """A number, a truth, a list or null where the text is one; YAML 1.1 takes 1e-6 for a word."""
    if _FLOAT.match(text):
        return float(text)
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | list) or value is None else text

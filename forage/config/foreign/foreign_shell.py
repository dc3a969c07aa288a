"""Reads the settings in a shell script: overrides (``a.b=c``) and flags (``--name value``).

The script is never executed. Its own variables, ``$HOME``, the current directory and the script's
folder are substituted; other variables are reported. ``foreign_file.py`` adds the files that the
script names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_COMMAND = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_][\w.]*)=(.*)$", re.DOTALL)
_NO_VALUE = re.compile(r"--|[)|>&]|2>|\$[@*]|\$\{\w+\[")  # the next flag, an array, a redirection
_SOURCED = re.compile(r"^\s*(?:source|\.)\s+(\S+)")


class ShellScript:
    """A script's settings as text, in order, with its missing files and unused variables."""

    def __init__(self, path: Path, find: Callable[[str], Path | None]) -> None:
        self._folder = path.resolve().parent
        self._find = find
        self._variables = {"HOME": str(Path.home()), "PWD": "."}
        self._used = {*self._variables}
        self.missing_files: list[str] = []

    @property
    def unused_variables(self) -> dict[str, str]:
        """Variables that no setting uses; the trainer may still read some of them."""
        return {name: text for name, text in self._variables.items() if name not in self._used}

    def settings(self, text: str) -> Iterator[tuple[str, Any]]:
        """The overrides and flags of all commands, arrays and sourced files."""
        text = re.sub(r"(?m)^\s*#.*$", "", text)
        for line in re.sub(r"\\\s*\n", " ", text).splitlines():
            line = re.sub(r"^\s*\w+=\(", "", _COMMAND.sub(self._command, line))
            if sourced := _SOURCED.match(line):
                yield from self._sourced(self._substitute(sourced.group(1).strip("\"'")))
                continue
            if assignment := _ASSIGNMENT.match(line):
                self._assign(assignment.group(1), assignment.group(2).strip("\"'"))
                if " " not in line.strip().removeprefix("export ").partition("=")[2].strip():
                    continue
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a quoted string over several lines, which contains no setting
                words = line.split()
            yield from _settings([self._substitute(word) for word in words])

    def _assign(self, name: str, value: str) -> None:
        is_argument = re.fullmatch(r"\$\{?\d\}?", value)  # of the script, next to a default
        if not (is_argument and name in self._variables):
            self._variables[name] = self._substitute(value)

    def _sourced(self, name: str) -> Iterator[tuple[str, Any]]:
        path = self._find(name)
        if path is None:
            self.missing_files.append(name)
        else:
            yield from ShellScript(path, self._find).settings(path.read_text(encoding="utf-8"))

    def _command(self, found: re.Match[str]) -> str:
        """Evaluates a command substitution that gives a folder; leaves others unchanged."""
        if "BASH_SOURCE" in found.group() or "$0" in found.group():
            return str(self._folder)
        return "." if found.group(0) == "$(pwd)" else found.group(0)

    def _substitute(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            name = found.group(1) or found.group(3)
            self._used.add(name)
            return self._variables.get(name, (found.group(2) or found.group(0)).strip("\"'"))

        return _VARIABLE.sub(value, text)


def _settings(words: list[str]) -> Iterator[tuple[str, Any]]:
    if words[:1] == ["ray"] and words[1:2] != ["job"]:
        return
    programs = [place for place, word in enumerate(words) if Path(word).name.startswith("python")]
    words = words[programs[-1] + 1 :] if programs else words
    for place, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            name, has_value, text = word[2:].partition("=")
            if has_value:
                yield name, text.rstrip(")")
                continue
            values = [value.rstrip(")") for value in takewhile(_is_value, words[place + 1 :])]
            yield name, values if len(values) > 1 else (values or ["true"])[0]
        elif override := _OVERRIDE.match(word):
            name = override.group(1)
            if "." in name or name.islower():  # not a variable of the environment
                yield name, override.group(2)


def _is_value(word: str) -> bool:
    return not (_NO_VALUE.match(word) or _OVERRIDE.match(word))

"""The code blocks of a page, and what the comment before each says about running it.

``<!-- runs with: 40000 -> 60; + trainer.num_steps=1 -->`` makes a block small enough for a test: it
gives words to replace in its lines and, after the ``+``, settings to add to its commands with a
recipe. ``<!-- not run: why -->`` means that a block is only checked: its commands, their options
and settings must exist. A block without a comment runs unchanged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANGUAGES = ("bash", "python", "yaml", "json", "console", "text")

_FENCE = re.compile(r"^( *)```(.*)$")
_COMMENT = re.compile(r"^\s*<!-- (runs with|not run): (.+?) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; ``reason`` says why it is not run, or is None."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None = None
    replaced: tuple[tuple[str, str], ...] = ()
    added: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[str]:
        """The command lines: continued lines joined, comments and prompts removed."""
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines():
            if self.language == "console" and not line.startswith("$ "):
                continue  # output of a command
            line = line.removeprefix("$ ")
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            for old, new in self.replaced:
                line = line.replace(old, new)
            yield line


def blocks_of(page: Path, name: str) -> list[Block]:
    """The blocks of a page in order."""
    found: list[Block] = []
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    comment: re.Match[str] | None = None
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            if line.strip():
                comment = _COMMENT.match(line)
            continue
        indent, language = fence.groups()
        body: list[str] = []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            body.append(inner.removeprefix(indent))
        said = {} if comment is None else _said(*comment.groups())
        found.append(Block(name, number, language or "text", "\n".join(body) + "\n", **said))
        comment = None
    return found


def _said(kind: str, text: str) -> dict[str, Any]:
    """The fields of a block set by its comment."""
    if kind == "not run":
        return {"reason": text}
    parts = [part.strip() for part in text.split(";")]
    pairs = tuple(tuple(part.split(" -> ", 1)) for part in parts if " -> " in part)
    added = tuple(word for part in parts if part.startswith("+ ") for word in part[2:].split())
    assert len(pairs) + any(part.startswith("+ ") for part in parts) == len(parts), text
    return {"replaced": pairs, "added": added}


def words_of(command: str) -> list[str]:
    """A command's words, without a comment, a ``&`` at its end, or ``...``."""
    words = shlex.split(command, comments=True)
    return [word for word in words if word not in ("&", "...")]

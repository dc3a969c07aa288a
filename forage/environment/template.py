"""Prompt templates: texts with a place for the question, built in or from a file.

``check_template`` holds a template against the protocol that it is to be used with: a prompt that
teaches tags which nothing reads would waste a run. Encoding is ``prompt.py``'s business.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Self

from forage.environment.actions import Answer, Invalid
from forage.errors import UserError

if TYPE_CHECKING:
    from forage.environment.protocol import TurnProtocol

BUILT_IN = ("search-r1", "brief", "tools")
SLOT = "{question}"

_TAG = re.compile(r"<(/?)([a-z_]{3,20})>")
# All tags that one protocol or another reads; others are the template's own affair.
_TAG_NAMES = ("think", "search", "information", "answer", "tool_call", "tool_response")


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text with one ``{question}`` in it; other braces mean nothing."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if self.text.count(SLOT) != 1:
            raise UserError(
                f"the prompt template {self.name} holds {SLOT} {self.text.count(SLOT)} times; "
                "write it exactly once, where the question belongs"
            )

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """A built-in template by name, or one from a file; raises ``UserError``."""
        if name_or_path in BUILT_IN:
            folder = resources.files("forage.environment") / "prompts"
            text = (folder / f"{name_or_path}.txt").read_text(encoding="utf-8")
            return cls(str(name_or_path), text)
        try:
            return cls(str(name_or_path), Path(name_or_path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"environment.prompt is {str(name_or_path)!r}, which is neither a built-in "
                f"template ({', '.join(BUILT_IN)}) nor a readable file: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"the prompt template {name_or_path} is not UTF-8 text") from error


def check_template(template: PromptTemplate, protocol: TurnProtocol) -> None:
    """Refuse a template whose tags the protocol's parser does not read; raises ``UserError``.

    Each tag must be one of the protocol's, be closed as often as it is opened, and, where it acts,
    be shown as the parser reads it: the policy will copy it.
    """
    where = f"the prompt template {template.name}"
    tags = [(match.start(), match[1], match[2]) for match in _TAG.finditer(template.text)]
    for start, slash, name in tags:
        _check_name(name, where, protocol)
        if slash or name not in protocol.action_tags:
            continue
        action = protocol.parse(template.text[start:])
        if isinstance(action, Invalid) or isinstance(action, Answer) != (name == "answer"):
            why = f" ({action.reason})" if isinstance(action, Invalid) else ""
            raise UserError(
                f"{where} shows {template.text[start : start + 60]!r}, which is no valid "
                f"<{name}>{why}; write an example as the policy should write it"
            )
    num_of_tag = Counter((slash, name) for _, slash, name in tags)
    for name in protocol.tags:
        num_opened, num_closed = num_of_tag["", name], num_of_tag["/", name]
        if num_opened != num_closed:
            raise UserError(
                f"{where} opens <{name}> {num_opened} times and closes it {num_closed} times"
            )


def _check_name(name: str, where: str, protocol: TurnProtocol) -> None:
    if name in protocol.tags:
        return
    if name in _TAG_NAMES:
        raise UserError(
            f"{where} shows <{name}>, which environment.protocol: {protocol.name} does not read; "
            "choose another template or another protocol"
        )
    if close := difflib.get_close_matches(name, protocol.tags, n=1, cutoff=0.75):
        raise UserError(f"{where} shows <{name}>; did you mean <{close[0]}>?")

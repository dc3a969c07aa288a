"""What one turn of the policy amounts to: a search, a call of another tool, an answer, or neither.

Pure: text in, action out. ``text`` is what the policy sampled in one turn, never the prompt or a
passage, so nothing else can act on its behalf. Which tools there are, and how native calls are
spelt, is the protocol's (``protocol.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forage.types import SEARCH_TOOL, TAGS_PROTOCOL, ActionKind, Tag

SEARCH_OPEN, SEARCH_CLOSE = Tag.SEARCH.opening, Tag.SEARCH.closing
ANSWER_OPEN, ANSWER_CLOSE = Tag.ANSWER.opening, Tag.ANSWER.closing
THINK_OPEN, THINK_CLOSE = Tag.THINK.opening, Tag.THINK.closing
INFORMATION_OPEN, INFORMATION_CLOSE = Tag.INFORMATION.opening, Tag.INFORMATION.closing

PROTOCOL_TAGS = tuple(side for tag in TAGS_PROTOCOL for side in (tag.opening, tag.closing))

STOP_STRINGS = (SEARCH_CLOSE, ANSWER_CLOSE)


@dataclass(frozen=True, slots=True)
class Search:
    """The policy asks the search engine; a native tool call may ask several things at once."""

    kind: ClassVar = ActionKind.SEARCH
    query: str
    others: tuple[str, ...] = ()

    @property
    def queries(self) -> tuple[str, ...]:
        return (self.query, *self.others)

    @property
    def tool(self) -> str:
        return SEARCH_TOOL

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"query_list": list(self.queries)}

    @property
    def text(self) -> str:
        """The queries, one a line."""
        return "\n".join(self.queries)


@dataclass(frozen=True, slots=True)
class Call:
    """The policy calls another tool than search, with these arguments by name."""

    kind: ClassVar = ActionKind.CALL
    tool: str
    arguments: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The one argument as it is where it is a text, else all of them as JSON."""
        match list(self.arguments.values()):
            case [str(text)]:
                return text
        return json.dumps(dict(self.arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy gives its final answer, which may be empty."""

    kind: ClassVar = ActionKind.ANSWER
    text: str


@dataclass(frozen=True, slots=True)
class Invalid:
    """The turn holds no action; ``reason`` is a sentence that says why.

    ``reply``: what a tool's message says of a call that cannot be run; "" where none answers.
    """

    kind: ClassVar = ActionKind.INVALID
    reason: str
    reply: str = ""

    @property
    def text(self) -> str:
        return self.reason


Action = Search | Call | Answer | Invalid


def parse_action(text: str) -> Search | Answer | Invalid:
    """The first complete block decides; it begins with the last tag opened before its end.

    The tags protocol with search as its only tool.
    """
    match first_action(text, (Tag.SEARCH,)):
        case Invalid() as invalid:
            return invalid
        case (Tag.SEARCH, query):
            return Search(query) if query else Invalid("The search query is empty.")
        case (_, answer):
            return Answer(answer)


def first_action(text: str, tools: Sequence[str]) -> tuple[str, str] | Invalid:
    """The name and the stripped inside of the first complete block of a tool or an answer.

    Found by plain searches rather than by an expression, which takes quadratic time on a turn full
    of opening tags: if the first opening tag of a kind is never closed, no later one is.
    """
    names = (*tools, Tag.ANSWER.value)
    blocks = [
        (*block, name) for name in names if (block := first_block(text, f"<{name}>", f"</{name}>"))
    ]
    if not blocks:
        return Invalid(_why_invalid(text, names))
    _, inside, name = min(blocks)
    return name, inside.strip()


def first_block(
    text: str, opening: str, closing: str, is_leftmost: bool = False
) -> tuple[int, str] | None:
    """Where the first complete block starts and what it holds, or None.

    A tag that a thought mentions is left open, so the last one opened before the end begins the
    block: in ``I use <search> now. <search>q</search>`` it holds ``q``. ``is_leftmost``: the first
    one does, as for the expressions of the published systems.
    """
    first = text.find(opening)
    end = text.find(closing, first + len(opening)) if first >= 0 else -1
    if end < 0:
        return None
    start = first if is_leftmost else text.rfind(opening, first, end)
    return start, text[start + len(opening) : end]


def _why_invalid(text: str, names: Sequence[str]) -> str:
    if not text.strip():
        return "The turn is empty."
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if opening in text and closing not in text:
            return f"{opening} is opened but never closed with {closing}."
        if closing in text and opening not in text:
            return f"{closing} closes a block that {opening} never opened."
        if opening in text and closing in text:
            return f"{closing} comes before {opening}."
    *others, last = (f"<{name}>" for name in names)
    if len(others) == 1:
        return f"The turn holds neither {others[0]} nor {last}."
    return f"The turn holds none of {', '.join(others)} and {last}."

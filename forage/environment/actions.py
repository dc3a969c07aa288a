"""What one turn of the policy amounts to under the tags protocol: a search, an answer, or neither.

Pure: text in, action out. ``text`` is what the policy sampled in one turn, never the prompt or a
passage, so nothing else can act on its behalf.
"""

from __future__ import annotations

from dataclasses import dataclass

SEARCH_OPEN, SEARCH_CLOSE = "<search>", "</search>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
INFORMATION_OPEN, INFORMATION_CLOSE = "<information>", "</information>"

PROTOCOL_TAGS = (
    *(THINK_OPEN, THINK_CLOSE, SEARCH_OPEN, SEARCH_CLOSE),
    *(INFORMATION_OPEN, INFORMATION_CLOSE, ANSWER_OPEN, ANSWER_CLOSE),
)

STOP_STRINGS = (SEARCH_CLOSE, ANSWER_CLOSE)

INVALID_ACTION_MESSAGE = (
    f"\n\nThat was no valid action. To search, write {SEARCH_OPEN} query {SEARCH_CLOSE}. "
    f"To answer, write {ANSWER_OPEN} answer {ANSWER_CLOSE}. Try again.\n\n"
)


@dataclass(frozen=True, slots=True)
class Search:
    """The policy asks the search engine; a native tool call may ask several things at once."""

    query: str
    others: tuple[str, ...] = ()

    @property
    def queries(self) -> tuple[str, ...]:
        return (self.query, *self.others)


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy gives its final answer, which may be empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Invalid:
    """The turn holds no action; ``reason`` is a sentence that says why."""

    reason: str


Action = Search | Answer | Invalid


def parse_action(text: str) -> Search | Answer | Invalid:
    """The first complete block decides: ``<(search|answer)>(.*?)</\\1>`` over lines, stripped.

    Found by plain searches rather than by that expression, which takes quadratic time on a turn
    full of opening tags: if the first opening tag of a kind is never closed, no later one is.
    """
    search = first_block(text, SEARCH_OPEN, SEARCH_CLOSE)
    answer = first_block(text, ANSWER_OPEN, ANSWER_CLOSE)
    if search and (answer is None or search[0] < answer[0]):
        query = search[1].strip()
        return Search(query) if query else Invalid("The search query is empty.")
    if answer:
        return Answer(answer[1].strip())
    return Invalid(_why_invalid(text))


def first_block(text: str, opening: str, closing: str) -> tuple[int, str] | None:
    """Where the first block starts and what it holds, or None."""
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return (start, text[start + len(opening) : end]) if end >= 0 else None


def _why_invalid(text: str) -> str:
    if not text.strip():
        return "The turn is empty."
    for opening, closing in ((SEARCH_OPEN, SEARCH_CLOSE), (ANSWER_OPEN, ANSWER_CLOSE)):
        if opening in text and closing not in text:
            return f"{opening} is opened but never closed with {closing}."
        if closing in text and opening not in text:
            return f"{closing} closes a block that {opening} never opened."
        if opening in text and closing in text:
            return f"{closing} comes before {opening}."
    return f"The turn holds neither {SEARCH_OPEN} nor {ANSWER_OPEN}."

"""The exact texts and rules of published systems, for checkpoints that were trained with them.

A dialect says how results are written and framed, how a turn is read, and what follows a turn
without an action; ``environment.dialect`` names it, and ``forage`` is the absence of one. What no
dialect changes: sampled tokens stay as they are, passages are made harmless, and the closing tag of
an observation is always there. docs/tools.md has the differences side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from forage.config.environment_config import EnvironmentConfig
from forage.environment.actions import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    INFORMATION_CLOSE,
    INFORMATION_OPEN,
    SEARCH_CLOSE,
    SEARCH_OPEN,
    THINK_OPEN,
    Answer,
    Invalid,
    Search,
    first_block,
)
from forage.environment.observation import ResultText
from forage.types import Hit, Passage

Show = Callable[[Sequence[Sequence[Hit]]], list[ResultText]]
"""The hits of each query of a call, as the model reads them."""

_TRY_AGAIN = (
    "\nMy previous action is invalid. If I want to search, I should put the query between "
    f"{SEARCH_OPEN} and {SEARCH_CLOSE}. If I want to give the final answer, I should put the "
    f"answer between {ANSWER_OPEN} and {ANSWER_CLOSE}. Let me try again.\n"
)
_RLINF_CHARACTERS = 5000
_CUT_MARK = "...(truncated)..."


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one published system writes and reads.

    ``opening`` and ``closing`` stand around results, inside the tool's message where calls are
    native. ``invalid_message`` None: a turn without an action ends the episode. ``ends_when_cut``:
    so does a turn that was cut at its budget.
    """

    opening: str
    closing: str
    show: Show
    invalid_message: str | None = None
    ends_when_cut: bool = False
    is_search_first: bool = False
    """Whether a search counts even where an answer stands before it."""

    def read(self, text: str) -> Search | Answer | Invalid:
        """What a turn amounts to in tags: the text up to the first closing search tag, in which
        a block begins at the first opening tag, also at one that a thought mentions."""
        end = text.find(SEARCH_CLOSE)
        text = text if end < 0 else text[: end + len(SEARCH_CLOSE)]
        search = first_block(text, SEARCH_OPEN, SEARCH_CLOSE, is_leftmost=True)
        answer = first_block(text, ANSWER_OPEN, ANSWER_CLOSE, is_leftmost=True)
        if search and (answer is None or self.is_search_first or search < answer):
            return Search(search[1].strip())
        if answer:
            return Answer(answer[1].strip())
        return Invalid("The turn holds neither a whole search nor a whole answer.")


def dialect_of(config: EnvironmentConfig) -> Dialect | None:
    """The dialect of ``environment.dialect``; None for Forage's own."""
    information = f"\n\n{INFORMATION_OPEN}", f"{INFORMATION_CLOSE}\n\n"
    match config.dialect:
        case "forage":
            return None
        case "search_r1":
            return Dialect(*information, _search_r1, _TRY_AGAIN)
        case "slime":
            return Dialect(*information, _search_r1, _TRY_AGAIN, ends_when_cut=True)
        case "rlinf":
            opening = f"\n\n{INFORMATION_OPEN}\n"
            closing = f"\n{INFORMATION_CLOSE}\n{THINK_OPEN}\n"
            return Dialect(opening, closing, _rlinf, is_search_first=True)
        case "verl":
            limit = config.max_reply_characters
            return Dialect('{"result": "', '"}', partial(_verl, limit))


def _search_r1(hits_QK: Sequence[Sequence[Hit]]) -> list[ResultText]:
    """``Doc 1(Title: "Rome") Rome is ...``, a line a passage; nothing for nothing."""
    return _stripped(
        ResultText(f"Doc {number}(Title: {title}) {text}\n", passage.id)
        for hits_K in hits_QK
        for number, passage, title, text in _numbered(hits_K)
    )


def _rlinf(hits_QK: Sequence[Sequence[Hit]]) -> list[ResultText]:
    """``[Doc 1](url):`` and the contents below it, an empty line between passages."""
    texts: list[ResultText] = []
    for hits_K in hits_QK:
        for number, hit in enumerate(hits_K, start=1):
            passage = hit.passage
            address = passage.fields.get("url") or passage.id
            contents = _contents(passage)[:_RLINF_CHARACTERS]
            gap = "\n\n" if number > 1 else ""
            texts.append(ResultText(f"{gap}[Doc {number}]({address}):\n{contents}", passage.id))
    return texts or [ResultText("No search results are found.")]


def _verl(limit: int | None, hits_QK: Sequence[Sequence[Hit]]) -> list[ResultText]:
    """``Doc 1 (Title: "Rome")`` and the text below it, as part of a JSON string; queries apart."""
    texts: list[ResultText] = []
    for hits_K in hits_QK:
        if texts:
            texts.append(ResultText("\n---\n"))
        texts += _stripped(
            ResultText(f"Doc {number} (Title: {title})\n{text}\n\n", passage.id)
            for number, passage, title, text in _numbered(hits_K)
        )
    escaped = [ResultText(json.dumps(t.text, ensure_ascii=False)[1:-1], t.id) for t in texts]
    return escaped if limit is None else _without_middle(escaped, limit)


def _without_middle(texts: Sequence[ResultText], limit: int) -> list[ResultText]:
    """The first and the last half of ``limit`` characters, a mark between; counted with the two
    ends of the JSON around them."""
    before, after = len('{"result": "'), len('"}')
    num_characters = sum(len(each.text) for each in texts)
    if before + num_characters + after <= limit:
        return list(texts)
    first, last = limit // 2 - before, num_characters - (limit // 2 - after)
    heads: list[ResultText] = []
    tails: list[ResultText] = []
    start = 0
    for each in texts:
        heads.append(replace(each, text=each.text[: max(first - start, 0)]))
        tails.append(replace(each, text=each.text[max(last - start, 0) :]))
        start += len(each.text)
    return [each for each in (*heads, ResultText(_CUT_MARK), *tails) if each.text]


def _numbered(hits_K: Sequence[Hit]) -> list[tuple[int, Passage, str, str]]:
    """Each passage with its number, its title as the corpus writes it, quotes included, and its
    text."""
    rows: list[tuple[int, Passage, str, str]] = []
    for number, hit in enumerate(hits_K, start=1):
        title, _, text = _contents(hit.passage).partition("\n")
        rows.append((number, hit.passage, title, text))
    return rows


def _contents(passage: Passage) -> str:
    """The passage as a line of the corpus holds it."""
    return f'"{passage.title}"\n{passage.text}' if passage.title else passage.text


def _stripped(texts: Iterable[ResultText]) -> list[ResultText]:
    """The texts, the last one without its white space at the end."""
    kept = list(texts)
    if kept:
        kept[-1] = replace(kept[-1], text=kept[-1].text.rstrip())
    return kept

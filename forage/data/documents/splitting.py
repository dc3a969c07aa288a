"""Splits documents into passages: windows of words or of a tokenizer's tokens, with overlap.

A passage keeps its document's title and records its position: ``start`` and ``end`` (characters of
the document's text), and the ``page`` or ``section`` of its first character. A document with pages
also gives the ``last_page``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forage.data.corpus import replace_surrogates
from forage.data.documents.document_formats import Mark
from forage.errors import UserError
from forage.types import Passage

Spans = Sequence[tuple[int, int]]

# In scripts without spaces, each character of Chinese and Japanese counts as a word.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")


@dataclass(frozen=True, slots=True)
class OwnDocument:
    """A text with a title; each of its passages gets ``fields`` on its corpus line."""

    id: str
    title: str
    text: str
    marks: tuple[Mark, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """The size of a passage: ``size`` units, of which ``overlap`` are repeated in the next.

    ``spans`` gives where each unit of a text begins and ends, in characters.
    """

    size: int
    overlap: int
    spans: Callable[[str], Spans]

    def __post_init__(self) -> None:
        if self.overlap >= self.size:
            raise UserError(
                f"the overlap of {self.overlap} is not below the passage size of {self.size}; "
                "reduce the overlap"
            )


def word_spans(text: str) -> Spans:
    """The span of each word: ``"a bc"`` gives ``[(0, 1), (2, 4)]``."""
    return [match.span() for match in _WORD.finditer(text)]


def token_spans(tokenizer: Path) -> Callable[[str], Spans]:
    """Returns a function that finds each token's span, from a model's ``tokenizer.json``."""
    from tokenizers import Tokenizer

    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise UserError(
            f"{tokenizer} has no tokenizer.json; name a model's directory, or split by words"
        )
    try:
        reader = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file} is not a tokenizer: {error}") from error
    reader.no_truncation()
    reader.no_padding()

    def spans(text: str) -> Spans:
        found = reader.encode(text, add_special_tokens=False).offsets
        return [(start, end) for start, end in found if end > start]

    return spans


def passages_of(documents: Iterable[OwnDocument], window: Window) -> Iterator[Passage]:
    """The passages of documents, with ids: ``guide.md#1``, ``guide.md#2`` and so on.

    A row of a table that fits into one passage keeps its own id.
    """
    for document in documents:
        title = " ".join(replace_surrogates(document.title).split())
        text = replace_surrogates(document.text)
        pieces = _windows(window.spans(text), window)
        marks: dict[str, str | int] = {}
        left = deque(document.marks)
        pages = [mark for mark in document.marks if mark.name == "page"]
        for number, (start, end) in enumerate(pieces, start=1):
            while left and left[0].start <= start:
                mark = left.popleft()
                marks[mark.name] = mark.value
            if pages:
                last = bisect_left(pages, end, key=lambda page: page.start)
                marks["last_page"] = pages[last - 1].value
            fields = {**document.fields, **marks, "start": start, "end": end}
            # A link to the passage; browsers open a PDF at ``#page=3``.
            page = f"#page={marks['page']}" if "page" in marks else ""
            fields.setdefault("url", f"{document.fields['file']}{page}")
            is_whole = len(pieces) == 1 and "row" in document.fields
            identity = document.id if is_whole else f"{document.id}#{number}"
            yield Passage(identity, title, text[start:end], fields)


def _windows(spans: Spans, window: Window) -> list[tuple[int, int]]:
    """The (start, end) characters of each passage.

    Five words in windows of 3 that share 1 give words 0 to 2, then 2 to 4.
    """
    step = window.size - window.overlap
    last = max(len(spans) - window.overlap, 1)
    return [
        (spans[first][0], spans[min(first + window.size, len(spans)) - 1][1])
        for first in range(0, last, step)
        if spans
    ]

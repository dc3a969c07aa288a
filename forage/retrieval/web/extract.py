"""The readable text of a page, and the part of it that a search was after.

Wraps trafilatura, which finds the article in the markup. Fetching is
``forage.retrieval.web.fetch``'s.
"""

from __future__ import annotations

import codecs
import logging
import re

from forage.retrieval.web.fetch import Fetched

# Text after this much is not kept: no passage and no reader asks for it.
MAX_TEXT_CHARS = 200_000

_ELLIPSIS = re.compile(r"\s*(?:\.\.\.|…)\s*")
_SPACES = re.compile(r"\s+")


class ExtractionError(Exception):
    """A page that the extractor stumbled over."""


class TextExtractor:
    """Finds what a person would read on a page; may be called from several threads."""

    def __init__(self) -> None:
        """Load trafilatura: half a second, and an extra."""
        import trafilatura

        logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # pages are bad all the time
        self._extract = trafilatura.extract

    def text(self, page: Fetched) -> str:
        """The readable text ("" where there is none); raises ``ExtractionError``."""
        source = _decode(page.body, page.charset)
        if page.is_html:
            try:
                text = self._extract(source, url=page.url, include_comments=False) or ""
            except Exception as error:  # the boundary of the extractor: strangers write its input
                raise ExtractionError(f"{type(error).__name__}: {error}") from error
        else:
            text = source if isinstance(source, str) else source.decode("utf-8", "replace")
        return text[:MAX_TEXT_CHARS].strip()


def passage_around(snippet: str, text: str, max_chars: int) -> str:
    """The ``max_chars`` of ``text`` around the longest part of ``snippet`` that it holds.

    A snippet is pieces of its page with ellipses between them. Where none is found, the beginning
    of the text; cut at words, white space squeezed to single spaces.
    """
    text = _SPACES.sub(" ", text).strip()
    if len(text) <= max_chars:
        return text
    pieces = [_SPACES.sub(" ", piece).strip() for piece in _ELLIPSIS.split(snippet)]
    start = 0
    for piece in sorted(filter(None, pieces), key=len, reverse=True):
        if place := re.search(re.escape(piece), text, re.IGNORECASE):
            start = max(0, place.start() - (max_chars - len(piece)) // 2)
            break
    start = min(start, len(text) - max_chars)
    return _at_words(text, start, start + max_chars)


def _at_words(text: str, start: int, end: int) -> str:
    """``text[start:end]`` without the words that the borders cut (one long word is kept)."""
    cut = text[start:end]
    if start > 0 and text[start - 1] != " ":
        cut = cut.partition(" ")[2] or cut
    if end < len(text) and text[end] != " ":
        cut = cut.rpartition(" ")[0] or cut
    return cut.strip()


def _decode(body: bytes, charset: str | None) -> str | bytes:
    """Text in the charset that the reply named; bytes where none is known: they are guessed at."""
    if charset is None:
        return body
    try:
        return body.decode(codecs.lookup(charset).name, "replace")
    except (LookupError, ValueError):
        return body

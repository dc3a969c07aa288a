"""Pages of the live web as text: fetched within bounds, extracted, the last ones kept.

``PageReader`` reads many pages at once, for a web source in page mode; ``WebPages`` answers
``/access`` from it. How the text of a page is found, ``extraction.py`` says. Pages of a file are
``forage.retrieval.sources.stored_pages``.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Self

from aiohttp.abc import AbstractResolver

from forage.errors import UserError
from forage.retrieval.cache import LruCache
from forage.retrieval.source import SourceError
from forage.retrieval.web.extraction import Extraction
from forage.retrieval.web.fetch import Fetcher, FetchError
from forage.retrieval.web.loop_thread import LoopThread
from forage.retrieval.web.page_text import ExtractionError
from forage.retrieval.web.providers.provider import PageSettings
from forage.retrieval.web.public_addresses import AddressGuard
from forage.retrieval.wire import Page

logger = logging.getLogger(__name__)

_ELLIPSIS = re.compile(r"\s*(?:\.\.\.|…)\s*")
_SPACES = re.compile(r"\s+")
_PAGES_KEPT = 512


class PageReader:
    """Texts of pages by address; belongs to the event loop it was made on."""

    def __init__(
        self,
        settings: PageSettings,
        guard: AddressGuard | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._settings = settings
        self._extraction = Extraction(settings.extraction_s, settings.extraction_mb)
        self._fetcher = Fetcher(
            settings.max_bytes, settings.max_redirects, settings.max_concurrent, guard, resolver
        )
        self._room = asyncio.Semaphore(settings.max_concurrent)
        self._texts: LruCache[str, str] = LruCache(_PAGES_KEPT)

    @classmethod
    async def open(
        cls, settings: PageSettings, guard: AddressGuard | None, resolver: AbstractResolver | None
    ) -> Self:
        """A reader that is ready; raises ``UserError`` where what finds texts does not start."""
        reader = cls(settings, guard, resolver)
        try:
            await reader._extraction.start()
        except ExtractionError as error:
            await reader.close()
            raise UserError(f"pages of the web cannot be read: {error}") from error
        return reader

    async def read_all(self, urls: Sequence[str]) -> dict[str, str | FetchError]:
        """Each address with its page's text, or why there is none, within the settings' deadline.

        All are read at once; those that the deadline cuts off do not hold the others up.
        """
        tasks = {url: asyncio.create_task(self._try_to_read(url)) for url in dict.fromkeys(urls)}
        if tasks:
            _, late = await asyncio.wait(tasks.values(), timeout=self._settings.deadline_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return {
            url: FetchError("no text before the deadline", is_temporary=True)
            if task.cancelled()
            else task.result()
            for url, task in tasks.items()
        }

    async def close(self) -> None:
        await self._extraction.close()
        await self._fetcher.close()

    async def _try_to_read(self, url: str) -> str | FetchError:
        try:
            return await self._read(url)
        except FetchError as error:
            logger.debug("no text of %.200r: %s", url, error.reason)
            return error

    async def _read(self, url: str) -> str:
        text = self._texts.get(url)
        if text is not None:
            return text
        async with self._room:
            page = await self._fetcher.fetch(url, self._settings.deadline_s)
        try:
            text = await self._extraction.text(page)
        except ExtractionError as error:
            raise FetchError(f"its text could not be found ({error})") from error
        if not text:
            raise FetchError("no text on the page")
        self._texts.put(url, text)
        return text


class WebPages:
    """Live pages for ``/access``: ``page(url)`` fetches, and remembers what it read last."""

    def __init__(
        self,
        settings: PageSettings | None = None,
        guard: AddressGuard | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._thread = LoopThread("web-pages")
        self._is_closed = False
        try:
            reader = PageReader.open(settings or PageSettings(), guard, resolver)
            self._reader = self._thread.run(reader)
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def page(self, url: str) -> Page | None:
        """The text behind ``url``, or None where there is no page to read (gone, refused, no text).

        Raises ``SourceError`` where asking again may help (no reply in time, server errors).
        """
        return self.pages([url])[0]

    def pages(self, urls: Sequence[str]) -> list[Page | None]:
        """``page`` of each address, read at the same time.

        Those that were read are kept, so that after a ``SourceError`` they are not fetched again.
        """
        texts = self._thread.run(self._reader.read_all(urls))
        for url, text in texts.items():
            if isinstance(text, FetchError) and text.is_temporary:
                raise SourceError(f"{url[:200]} could not be read: {text.reason}")
        return [
            Page(url=url, contents=text) if isinstance(text := texts[url], str) else None
            for url in urls
        ]

    def close(self) -> None:
        """End what is under way; harmless when repeated."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.run(self._reader.close())
            self._thread.close()


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

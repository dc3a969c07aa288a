"""The web as a source: a paid search provider, asked with care, and if wanted the pages it names.

``open_web_source`` makes one from settings. The queries of a batch go out together, within a rate,
a spend cap and a deadline; an answer that was paid for is kept. How a provider is spoken to is
``forage.retrieval.web.providers``' and ``web_exchange``'s; how pages are read, ``web_pages``'.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import aiohttp
from aiohttp.abc import AbstractResolver

from forage.retrieval.cache import LruCache
from forage.retrieval.client.exchange import Failure
from forage.retrieval.source import SourceError
from forage.retrieval.web.budget import RateLimit, Spending
from forage.retrieval.web.extract import passage_around
from forage.retrieval.web.loop_thread import LoopThread
from forage.retrieval.web.provider_replies import WebResult
from forage.retrieval.web.providers import (
    Brave,
    GoogleCustomSearch,
    Provider,
    SerpApi,
    Serper,
    fit_query,
)
from forage.retrieval.web.public_addresses import AddressGuard
from forage.retrieval.web.web_exchange import ask_provider
from forage.retrieval.web.web_pages import PageReader
from forage.retrieval.web.web_settings import WebSettings, read_key
from forage.types import FailureKind, Hit, Passage

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 8.0
_REFUSED_FOR_S = 60.0


def open_web_source(
    settings: WebSettings,
    guard: AddressGuard | None = None,
    resolver: AbstractResolver | None = None,
) -> WebSource:
    """The web through one provider; raises ``UserError`` where its key or ledger is missing.

    ``guard`` and ``resolver`` are for pages: what may be fetched, and how names are looked up.
    """
    return WebSource(_provider(settings, read_key(settings)), settings, guard, resolver)


def _provider(settings: WebSettings, key: str) -> Provider:
    num_results = settings.num_results
    if settings.provider == "serper":
        provider = Serper(key, num_results)
    elif settings.provider == "google":
        assert settings.engine_id is not None, "the settings refuse Google without its engine"
        provider = GoogleCustomSearch(key, settings.engine_id, num_results)
    elif settings.provider == "serpapi":
        provider = SerpApi(key, settings.engine or "google", num_results)
    else:
        provider = Brave(key, num_results)
    return replace(provider, url=settings.url) if settings.url else provider


class WebSource:
    """A provider as a source.

    A batch in which one query fails raises, yet loses nothing that was paid for: each answer is
    kept by its query as it arrives, so asking the batch again, or its queries one by one, costs
    only what failed. What the provider refused for good is refused again for a minute without
    asking. Scores are 1 / rank, since no provider gives any; at most ``num_results`` hits a query
    are found, however many are asked for. An empty query finds nothing and costs nothing.
    """

    def __init__(
        self,
        provider: Provider,
        settings: WebSettings,
        guard: AddressGuard | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """Start the thread that asks; raises ``UserError`` where the ledger is damaged."""
        self._provider = provider
        self._settings = settings
        self._spending = Spending(provider.name, settings.max_spend_usd, settings.ledger)
        self._rate = RateLimit(settings.rate_per_s)
        self._room = asyncio.Semaphore(settings.max_concurrent)
        self._answers: LruCache[str, tuple[WebResult, ...]] = LruCache(settings.cache_size)
        self._refusals: LruCache[str, tuple[float, SourceError]] = LruCache(settings.cache_size)
        self._is_closed = False
        self._thread = LoopThread(f"web-{provider.name}")
        try:
            self._reader, self._session = self._thread.run(self._connect(guard, resolver))
        except BaseException:
            self._thread.close()
            raise

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def id(self) -> str:
        """Names what decides the answers; the web itself changes under it all the same."""
        settings = self._settings
        parts = [*self._provider.answers_depend_on, settings.mode]
        if settings.mode == "pages":
            parts.append(settings.pages.model_dump_json())
        return f"{self.name}-{sha256(repr(parts).encode()).hexdigest()[:16]}"

    @property
    def num_passages(self) -> int | None:
        return None

    @property
    def spent_usd(self) -> float:
        """What this provider cost so far (over all that share the ledger, where there is one)."""
        return self._spending.spent_usd

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query at most ``topk`` hits, best first; raises ``SourceError``.

        A passage is a result: its address is the id, and its text the snippet, or in page mode the
        part of the page around the snippet (the snippet where the page cannot be read).
        """
        assert topk >= 1, f"topk is {topk}; it must be 1 or more"
        return self._thread.run(self._search([fit_query(query) for query in queries], topk))

    def close(self) -> None:
        """Hang up and end the thread; harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.run(self._disconnect())
        self._thread.close()
        logger.info("%s: %.4f USD spent", self.name, self.spent_usd)

    async def _connect(
        self, guard: AddressGuard | None, resolver: AbstractResolver | None
    ) -> tuple[PageReader | None, aiohttp.ClientSession]:
        with_pages = self._settings.mode == "pages"
        reader = PageReader(self._settings.pages, guard, resolver) if with_pages else None
        return reader, aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())

    async def _disconnect(self) -> None:
        await self._session.close()
        if self._reader is not None:
            await self._reader.close()

    async def _search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        answers = await self._answer_all(queries)
        results = [answers[query][:topk] for query in queries]
        texts = await self._read_pages([result for found in results for result in found])
        return [
            [
                Hit(Passage(r.url, r.title, texts.get(r, r.snippet)), 1 / rank)
                for rank, r in enumerate(found, start=1)
            ]
            for found in results
        ]

    async def _answer_all(self, queries: Sequence[str]) -> dict[str, tuple[WebResult, ...]]:
        """The results of every query; raises one ``SourceError`` for all that failed."""
        answers: dict[str, tuple[WebResult, ...]] = {"": ()}
        new: list[str] = []
        for query in dict.fromkeys(queries):
            kept = self._answers.get(query)
            if kept is not None:
                answers[query] = kept
            elif query:
                new.append(query)
        deadline = asyncio.get_running_loop().time() + self._settings.deadline_s
        outcomes = await asyncio.gather(*(self._answer(query, deadline) for query in new))
        failures: list[SourceError] = []
        for query, outcome in zip(new, outcomes, strict=True):
            if isinstance(outcome, SourceError):
                failures.append(outcome)
            else:
                answers[query] = outcome
        if failures:
            raise self._joined(failures, len(new))
        return answers

    async def _answer(self, query: str, deadline: float) -> tuple[WebResult, ...] | SourceError:
        """Ask until there is an answer, tries and time run out, or asking is pointless."""
        loop = asyncio.get_running_loop()
        until, refusal = self._refusals.get(query) or (0.0, None)
        if refusal is not None and loop.time() < until:
            return refusal
        reason = "not asked"
        for attempt in range(self._settings.max_retries + 1):
            async with self._room:
                outcome = await self._ask(query, deadline)
            if isinstance(outcome, SourceError):
                return outcome if attempt == 0 or not outcome.is_temporary else SourceError(reason)
            if not isinstance(outcome, Failure):
                self._answers.put(query, outcome)
                return outcome
            reason = outcome.detail
            if outcome.is_final:
                refusal = SourceError(reason, is_temporary=False)
                self._refusals.put(query, (loop.time() + _REFUSED_FOR_S, refusal))
                return refusal
            wait_s = random.random() * min(_FIRST_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S)
            if outcome.retry_after_s:
                self._rate.pause_until(loop.time() + outcome.retry_after_s)
            if loop.time() + max(wait_s, outcome.retry_after_s) >= deadline:
                break
            await asyncio.sleep(wait_s)
        return SourceError(reason)

    async def _ask(
        self, query: str, deadline: float
    ) -> tuple[WebResult, ...] | Failure | SourceError:
        """One try: wait for its turn, pay, ask; a refusal that bills nothing is refunded."""
        loop, settings = asyncio.get_running_loop(), self._settings
        # A request that would have less than half its time is not worth paying for.
        turn = self._rate.reserve(loop.time(), deadline - settings.timeout_s / 2)
        if turn is None:
            return SourceError(
                f"no turn within {settings.deadline_s:g} s at {settings.rate_per_s:g} requests a "
                "second"
            )
        await asyncio.sleep(turn - loop.time())
        timeout_s = min(settings.timeout_s, deadline - loop.time())
        try:
            self._spending.pay(settings.price_usd)
            outcome = await ask_provider(self._session, self._provider, query, timeout_s)
            if not isinstance(outcome, Failure):
                return tuple(outcome)
            if outcome.kind in (FailureKind.REFUSED, FailureKind.SERVER_ERROR):
                self._spending.refund(settings.price_usd)
        except SourceError as error:
            return error
        return outcome

    def _joined(self, failures: Sequence[SourceError], num_asked: int) -> SourceError:
        """One error for a batch: temporary where anything in it is."""
        is_temporary = any(failure.is_temporary for failure in failures)
        which = f"{len(failures)} of {num_asked} queries failed" if num_asked > 1 else "failed"
        logger.warning("%s: %s: %s", self.name, which, failures[0].reason)
        return SourceError(f"{self.name}: {which}: {failures[0].reason}", is_temporary)

    async def _read_pages(self, results: Sequence[WebResult]) -> dict[WebResult, str]:
        """The passages of the results whose pages could be read (none in snippet mode)."""
        if self._reader is None:
            return {}
        pages = await self._reader.read_all([result.url for result in results])
        size = self._settings.pages.passage_chars
        passages: dict[WebResult, str] = {}
        for result in results:
            text = pages[result.url]
            if isinstance(text, str):
                passages[result] = passage_around(result.snippet, text, size)
        num_failed = sum(not isinstance(text, str) for text in pages.values())
        if num_failed:
            level = logging.WARNING if num_failed == len(pages) else logging.INFO
            logger.log(
                level, "%d of %d pages gave no text; snippets stand in", num_failed, len(pages)
            )
        return passages

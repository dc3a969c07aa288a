"""The client of a search server: many episodes ask one query each, few requests leave.

Queries that wait at the same moment travel in one request; failures are retried with jitter within
a deadline and then become a typed reply, never an exception; successes are cached. It speaks to
our server and to Search-R1's. What a failed search means for an episode is the environment's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import aiohttp
from yarl import URL

from forage.config import SearchConfig
from forage.errors import UserError
from forage.retrieval.cache import LruCache
from forage.retrieval.exchange import Failure, retrieve
from forage.types import FailureKind, Hit, SearchReply

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 8.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class SearchCounts:
    """What a client did so far.

    ``requests`` HTTP requests sent, tries included; ``queries`` searches asked for; ``failures``
    searches that failed, by kind; ``seconds`` the time that callers waited, added up.
    """

    requests: int = 0
    queries: int = 0
    cache_hits: int = 0
    retries: int = 0
    failures: dict[FailureKind, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A query on its way, shared by all who asked for it meanwhile; times are the loop's."""

    query: str
    reply: asyncio.Future[SearchReply]
    deadline: float


class SearchClient:
    """A ``Search`` over HTTP; use it on one event loop, and close it (or ``async with``)."""

    def __init__(self, settings: SearchConfig, backoff_s: float = 0.5) -> None:
        """``backoff_s``: the wait before the first retry, doubled with each one after it."""
        self._settings = settings
        self._base_url = _base_url(settings.url)
        self._backoff_s = backoff_s
        self._jitter = random.Random()  # its own: a run's seeded generators stay untouched
        self._cache: LruCache[str, tuple[Hit, ...]] = LruCache(settings.cache_size)
        self._pending: dict[str, _Pending] = {}
        self._queue: deque[_Pending] = deque()
        self._requests: set[asyncio.Task[None]] = set()
        self._is_flush_due = False
        self._is_closed = False
        self._session: aiohttp.ClientSession | None = None
        self._num_requests = self._num_queries = self._num_cache_hits = self._num_retries = 0
        self._failures: Counter[FailureKind] = Counter()
        self._seconds = 0.0

    @property
    def counts(self) -> SearchCounts:
        """A snapshot of the counters."""
        return SearchCounts(
            requests=self._num_requests,
            queries=self._num_queries,
            cache_hits=self._num_cache_hits,
            retries=self._num_retries,
            failures=dict(self._failures),
            seconds=self._seconds,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def search(self, query: str) -> SearchReply:
        """The passages for ``query``, or a typed failure within ``deadline_s``; never raises."""
        self._num_queries += 1
        hits = self._cache.get(query)
        if hits is not None:
            self._num_cache_hits += 1
            return SearchReply(hits)
        started = time.perf_counter()
        reply = await self._ask(query)
        self._seconds += time.perf_counter() - started
        if reply.failure is not None:
            self._failures[reply.failure] += 1
        return reply

    async def wait_until_ready(self) -> None:
        """Return when the server answers; ``UserError`` after ``startup_timeout_s``."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.startup_timeout_s
        is_said = False
        while True:
            problem = await self._readiness_problem()
            if problem is None:
                return
            if loop.time() + _POLL_S >= deadline:
                raise UserError(
                    f"no search server answers at {self._base_url} after "
                    f"{settings.startup_timeout_s:g} s ({problem}); start one with "
                    "`forage serve INDEX`, or set search.url to where it is"
                )
            if not is_said:
                logger.info("waiting for the search server at %s (%s)", self._base_url, problem)
                is_said = True
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """End the session; searches still waiting, and later ones, are answered ``CLOSED``."""
        self._is_closed = True
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        for pending in list(self._pending.values()):
            self._settle(pending, _failed(FailureKind.CLOSED, "the client was closed"))
        self._queue.clear()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, query: str) -> SearchReply:
        """Join the query if it is on its way already, else queue it; wait at most the deadline."""
        if self._is_closed:
            return _failed(FailureKind.CLOSED, "the client is closed")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.deadline_s
        pending = self._pending.get(query)
        if pending is None:
            pending = _Pending(query, loop.create_future(), deadline)
            self._pending[query] = pending
            self._queue.append(pending)
            self._schedule_flush()
        # wait() leaves the shared future alone when this caller is cancelled or out of time.
        await asyncio.wait([pending.reply], timeout=deadline - loop.time())
        if pending.reply.done():
            return pending.reply.result()
        return _failed(FailureKind.TIMEOUT, f"no reply within {self._settings.deadline_s:g} s")

    def _schedule_flush(self) -> None:
        """Send on the loop's next round: what is asked for in this one travels together."""
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        settings = self._settings
        now = asyncio.get_running_loop().time()
        while self._queue and len(self._requests) < settings.max_concurrent_requests:
            batch: list[_Pending] = []
            while self._queue and len(batch) < settings.max_queries_per_request:
                pending = self._queue.popleft()
                if pending.deadline <= now:
                    late = _failed(FailureKind.TIMEOUT, "the deadline passed before it was sent")
                    self._settle(pending, late)
                else:
                    batch.append(pending)
            if batch:
                task = asyncio.create_task(self._send(batch))
                self._requests.add(task)
                task.add_done_callback(partial(self._request_ended, batch))

    def _request_ended(self, batch: Sequence[_Pending], task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            # Not a failed search but a fault of this file: those who wait for it shall crash.
            for pending in batch:
                self._pending.pop(pending.query, None)
                if not pending.reply.done():
                    pending.reply.set_exception(bug)
        if self._queue and not self._is_closed:
            self._flush()

    async def _send(self, batch: Sequence[_Pending]) -> None:
        """Get replies for a batch; one that the server refuses for good is halved."""
        outcome = await self._exchange(batch)
        if not isinstance(outcome, Failure):
            for pending, hits in zip(batch, outcome, strict=True):
                self._cache.put(pending.query, hits)
                self._settle(pending, SearchReply(hits))
        elif outcome.is_final and len(batch) > 1:
            # One query that the server will not have must not fail those that travel with it.
            half = len(batch) // 2
            await self._send(batch[:half])
            await self._send(batch[half:])
        else:
            for pending in batch:
                self._settle(pending, _failed(outcome.kind, outcome.detail))

    async def _exchange(self, batch: Sequence[_Pending]) -> list[tuple[Hit, ...]] | Failure:
        """Try, and try again while retries and time last."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        deadline = min(pending.deadline for pending in batch)
        queries = [pending.query for pending in batch]
        tries = 0
        while True:
            timeout_s = min(settings.timeout_s, deadline - loop.time())
            if timeout_s <= 0:
                return Failure(FailureKind.TIMEOUT, f"no reply within {settings.deadline_s:g} s")
            self._num_requests += 1
            outcome = await retrieve(
                self._open_session(),
                f"{self._base_url}/retrieve",
                queries,
                settings.topk,
                timeout_s,
            )
            if not isinstance(outcome, Failure) or outcome.is_final:
                return outcome
            pause_s = max(self._pause_s(tries), outcome.retry_after_s)
            if tries == settings.max_retries or loop.time() + pause_s >= deadline:
                return outcome
            tries += 1
            self._num_retries += 1
            await asyncio.sleep(pause_s)

    def _pause_s(self, tries: int) -> float:
        """Exponential back-off with jitter, so that many clients do not return together."""
        return min(self._backoff_s * 2**tries, _MAX_BACKOFF_S) * self._jitter.uniform(0.5, 1.5)

    def _settle(self, pending: _Pending, reply: SearchReply) -> None:
        self._pending.pop(pending.query, None)
        if not pending.reply.done():
            pending.reply.set_result(reply)

    def _open_session(self) -> aiohttp.ClientSession:
        """The one session, opened on the loop that first needs it."""
        assert not self._is_closed, "a closed client sends nothing"
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._settings.max_concurrent_requests + 1)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def _readiness_problem(self) -> str | None:
        """None if the server is ready, else why it is not."""
        timeout_s = self._settings.timeout_s
        try:
            async with self._open_session().get(
                f"{self._base_url}/readyz", timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or type(error).__name__
        if status == 200:
            return None
        if status not in (404, 405):
            return f"/readyz answers HTTP {status}"
        # Not our server: Search-R1's own has no /readyz, and shows that it is up by searching.
        outcome = await retrieve(
            self._open_session(), f"{self._base_url}/retrieve", ["ready"], 1, timeout_s
        )
        return outcome.detail if isinstance(outcome, Failure) else None


def _base_url(url: str) -> str:
    """The server's address without ``/retrieve``, which Search-R1's settings carry."""
    try:
        parsed = URL(url)
    except ValueError as error:
        raise UserError(f"search.url {url!r} is not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"search.url is {url!r}; it must look like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/retrieve").rstrip("/")


def _failed(kind: FailureKind, detail: str) -> SearchReply:
    return SearchReply(failure=kind, detail=detail)

"""Brings queries to a server and hits back: retries, failover, and waiting for a first server.

A request that fails goes at once to another server where there is one, else again to the same after
a pause with jitter, while retries and time last. Only what may be retried is: a request that a
server calls wrong would be wrong anywhere. Joining queries, caching and counting callers is the
client's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

import aiohttp

from forage.config.search_config import SearchConfig
from forage.errors import UserError
from forage.retrieval.client.exchange import (
    Blame,
    Failure,
    Served,
    access,
    ask_what_is_served,
    retrieve,
)
from forage.retrieval.client.servers import Server, Servers
from forage.retrieval.serve.bearer_token import read_token
from forage.retrieval.wire import AccessRequest
from forage.types import FailureKind, Hit, PageText

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 8.0
_POLL_S = 0.25


T = TypeVar("T")
Exchange: TypeAlias = Callable[[str, float], Awaitable[T | Failure]]
"""Asks the server at an address once, within so many seconds."""


class Dispatcher:
    """One HTTP session to all servers; use it on one event loop, and close it."""

    def __init__(self, settings: SearchConfig, backoff_s: float) -> None:
        """``backoff_s``: the wait before the first retry, doubled with each one after it."""
        self._settings = settings
        self._token = read_token(settings.token_file)
        self._backoff_s = backoff_s
        self._jitter = random.Random()  # its own: a run's seeded generators stay untouched
        self._servers = Servers(settings.urls, backoff_s, self._jitter)
        self._session: aiohttp.ClientSession | None = None
        self.num_requests = self.num_retries = self.num_failovers = self.num_ejections = 0

    async def search(
        self, queries: Sequence[str], deadline: float
    ) -> list[tuple[Hit, ...]] | Failure:
        """The hits of each query, or why there are none, by ``deadline`` (the loop's time)."""
        topk = self._settings.topk
        return await self._ask(
            lambda url, timeout_s: retrieve(self._open_session(), url, queries, topk, timeout_s),
            deadline,
        )

    async def open_page(self, request: AccessRequest, deadline: float) -> PageText | Failure | None:
        """The page, None where there is none, or why nobody knows, by ``deadline``."""
        return await self._ask(
            lambda url, timeout_s: access(self._open_session(), url, request, timeout_s), deadline
        )

    async def _ask(self, exchange: Exchange[T], deadline: float) -> T | Failure:
        """What one of the servers replies, tried as often as settings and time allow."""
        loop = asyncio.get_running_loop()
        failure: Failure | None = None
        failed: set[Server] = set()
        refusing: set[Server] = set()
        tries = 0
        while True:
            server = await self._next_server(deadline, refusing, failed)
            timeout_s = min(self._settings.timeout_s, deadline - loop.time())
            if server is None:
                return failure or Failure(FailureKind.UNAVAILABLE, self._ejected())
            if timeout_s <= 0:
                return failure or Failure(FailureKind.TIMEOUT, "the deadline passed")
            self.num_retries += tries > 0
            self.num_failovers += tries > 0 and server not in failed
            outcome = await self._send(server, exchange, timeout_s)
            if not isinstance(outcome, Failure) or outcome.is_final:
                return outcome
            failure = outcome
            failed.add(server)
            if outcome.blame in (Blame.ACCESS, Blame.ADDRESS):
                refusing.add(server)
            if tries == self._settings.max_retries or len(refusing) == len(self._servers):
                return outcome
            if len(failed) == len(self._servers):
                pause_s = max(self._pause_s(tries), outcome.retry_after_s)
                if loop.time() + pause_s >= deadline:
                    return outcome
                await asyncio.sleep(pause_s)
            tries += 1

    async def wait_until_ready(self) -> None:
        """Return when a server answers; ``UserError`` after ``startup_timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.startup_timeout_s
        is_said = False
        while True:
            problems = await asyncio.gather(*(self._readiness_problem(s) for s in self._servers))
            said = "; ".join(
                f"{server.url}: {problem}"
                for server, problem in zip(self._servers, problems, strict=True)
                if problem
            )
            if None in problems:
                if said:
                    logger.warning("starting without some search servers (%s)", said)
                return
            addresses = ", ".join(server.url for server in self._servers)
            if loop.time() + _POLL_S >= deadline:
                corpora = self._settings.corpora
                wanted = f" (it is to serve {' and '.join(corpora)})" if corpora else ""
                raise UserError(
                    f"no search server answers at {addresses} after "
                    f"{self._settings.startup_timeout_s:g} s ({said}); start one with "
                    f"`forage serve INDEX`{wanted}, or set search.url to where it is"
                )
            if not is_said:
                logger.info("waiting for the search server at %s (%s)", addresses, said)
                is_said = True
            await asyncio.sleep(_POLL_S)

    async def what_is_served(self) -> Served | None:
        """What the first server that says so searches; None where none does."""
        for server in self._servers:
            served = await ask_what_is_served(
                self._open_session(), f"{server.url}/readyz", self._settings.timeout_s
            )
            if served is not None:
                return served
        return None

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _next_server(
        self, deadline: float, refusing: set[Server], failed: set[Server]
    ) -> Server | None:
        """Whom to ask, waited for where every circuit is open; None if that would be too late."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            server = self._servers.pick(now, refusing, failed)
            if server is not None:
                return server
            wait_s = self._servers.wait_s(now, refusing)
            if wait_s is None:
                wait_s = deadline - now
            elif now + wait_s >= deadline:
                return None
            if wait_s <= 0:
                return None
            await self._servers.wait_for_news(wait_s)

    async def _send(self, server: Server, exchange: Exchange[T], timeout_s: float) -> T | Failure:
        """One request, and what its outcome says about the server."""
        self.num_requests += 1
        with self._servers.request_to(server) as is_probe:
            outcome = await exchange(server.url, timeout_s)
            if not isinstance(outcome, Failure) or outcome.blame in (Blame.LOAD, Blame.QUERIES):
                server.breaker.succeed()
            elif server.breaker.fail(asyncio.get_running_loop().time(), is_probe):
                self.num_ejections += 1
                logger.warning("search server %s is left alone: %s", server.url, outcome.detail)
        return outcome

    def _pause_s(self, tries: int) -> float:
        """Exponential back-off with jitter, so that many clients do not return together."""
        return min(self._backoff_s * 2**tries, _MAX_BACKOFF_S) * self._jitter.uniform(0.5, 1.5)

    def _open_session(self) -> aiohttp.ClientSession:
        """The one session, opened on the loop that first needs it."""
        if self._session is None:
            token = self._token
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=2 * self._settings.max_concurrent_requests + 1
                ),
                headers={"Authorization": f"Bearer {token.get_secret_value()}"} if token else None,
            )
        return self._session

    async def _readiness_problem(self, server: Server) -> str | None:
        """None if the server is ready, else why not; ``UserError`` where it wants another token."""
        timeout_s = self._settings.timeout_s
        try:
            async with self._open_session().get(
                f"{server.url}/readyz", timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or type(error).__name__
        if status not in (200, 404, 405):
            return f"/readyz answers HTTP {status}"
        # No queries cost nothing and show whether our token is right. Search-R1's own server has
        # no /readyz, and shows that it is up by searching.
        queries = [] if status == 200 else ["ready"]
        outcome = await retrieve(self._open_session(), server.url, queries, 1, timeout_s)
        if not isinstance(outcome, Failure):
            server.breaker.succeed()  # whatever it did before, it is back
            return None
        if outcome.blame is Blame.ACCESS:
            raise UserError(
                f"the search server at {server.url} refuses our token ({outcome.detail}); name the "
                "right one with search.token_file or FORAGE_TOKEN"
            )
        return outcome.detail

    def _ejected(self) -> str:
        addresses = ", ".join(server.url for server in self._servers)
        return f"every server failed too often and is left alone for now: {addresses}"

"""The search servers that a client may ask, and which of them is asked next.

The one with the fewest requests under way, unless its circuit is open; a server whose ejection is
over is probed by the next request. What is sent, and what a failure means, is the dispatcher's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from yarl import URL

from forage.errors import UserError
from forage.retrieval.client.breaker import Breaker


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says that it searches; ``num_passages`` None where it does not say."""

    backend: str
    num_passages: int | None


class Server:
    """One address, its circuit, and how many requests are under way to it."""

    def __init__(self, url: str, breaker: Breaker) -> None:
        self.url = url
        self.breaker = breaker
        self.num_in_flight = 0


class Servers:
    """All servers of a client; they answer alike, so any of them may be asked."""

    def __init__(self, urls: Sequence[str], backoff_s: float, jitter: random.Random) -> None:
        """Raises ``UserError`` for no address, a text that is none, or one given twice."""
        bases = [base_url(url) for url in urls]
        if not bases:
            raise UserError("search.url is empty; name a server, like http://127.0.0.1:8000")
        if len(set(bases)) < len(bases):
            raise UserError(f"search.url names a server twice: {', '.join(bases)}")
        self._servers = [Server(base, Breaker(backoff_s, jitter)) for base in bases]
        self._turn = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._servers)

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers)

    def pick(
        self, now: float, refusing: Collection[Server] = (), failed: Collection[Server] = ()
    ) -> Server | None:
        """Whom to ask: never one of ``refusing``, of ``failed`` only where no other may be asked.

        None where every circuit is open.
        """
        allowed = [
            server
            for server in self._servers
            if server not in refusing and server.breaker.allows(now)
        ]
        fresh = [server for server in allowed if server not in failed] or allowed
        if not fresh:
            return None
        self._turn += 1

        def preference(place: int) -> tuple[bool, int, int]:
            server = fresh[place]
            turn = (place + self._turn) % len(fresh)
            return server.breaker.is_closed, server.num_in_flight, turn

        return fresh[min(range(len(fresh)), key=preference)]

    def wait_s(self, now: float, refusing: Collection[Server]) -> float | None:
        """Seconds until a request may be sent to any; None where a probe under way decides."""
        waits = [server.breaker.wait_s(now) for server in self._servers if server not in refusing]
        return min((wait for wait in waits if wait is not None), default=None)

    async def wait_for_news(self, timeout_s: float) -> None:
        """Return when a request has ended, or after ``timeout_s``."""
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([waiting], timeout=timeout_s)
        finally:
            waiting.cancel()

    @contextmanager
    def request_to(self, server: Server) -> Iterator[bool]:
        """A request under way; gives whether it is a probe. Report its outcome to the breaker."""
        is_probe = server.breaker.send()
        server.num_in_flight += 1
        try:
            yield is_probe
        except asyncio.CancelledError:
            server.breaker.abandon(is_probe)
            raise
        finally:
            server.num_in_flight -= 1
            self._changed.set()
            self._changed = asyncio.Event()


def base_url(url: str) -> str:
    """A server's address without ``/retrieve``, which Search-R1's settings carry."""
    try:
        parsed = URL(url)
    except ValueError as error:
        raise UserError(f"search.url {url!r} is not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"search.url is {url!r}; it must look like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/retrieve").rstrip("/")

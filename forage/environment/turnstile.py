"""Limits how many episodes start or continue per round of the event loop.

One reply of a search server may wake as many episodes as it had queries, each of which then
truncates and encodes its passages on the event loop; a step or an evaluation may start thousands.
They continue in order of arrival, a few per round of the loop, so that requests, timers and other
episodes get their turns in between.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """A limit for waiters on one event loop; it can be used on another loop afterwards."""

    def __init__(self, num_at_once: int) -> None:
        """``num_at_once`` callers pass per round of the loop."""
        self._num_at_once = num_at_once
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def through(self) -> None:
        """Returns once earlier callers have passed and their round of the loop has ended."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._waiting.clear()
        if not self._waiting:
            loop.call_soon(self._admit)
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _admit(self) -> None:
        num_admitted = 0
        while self._waiting and num_admitted < self._num_at_once:
            place = self._waiting.popleft()
            if not place.cancelled():
                place.set_result(None)
                num_admitted += 1
        if self._waiting and self._loop is not None:
            self._loop.call_soon(self._admit)

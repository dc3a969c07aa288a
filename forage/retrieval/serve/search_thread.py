"""One thread that calls are sent to from an event loop, in order, one at a time.

A daemon, unlike the threads of an executor: a search that never returns must not keep a server
that was told to stop from stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SearchThread:
    """Runs blocking calls for an event loop; everything it calls sees one thread only."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``call`` returns or raises; a caller that is cancelled does not stop the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run_call() -> None:
            settle: Callable[[Any], None]
            try:
                settle, outcome = future.set_result, call(*args, **kwargs)
            except BaseException as error:  # it belongs to the caller, whatever it is
                settle, outcome = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop has gone, and the caller with it
                loop.call_soon_threadsafe(_unless_done, future, settle, outcome)

        self._calls.put(run_call)
        return await future

    @property
    def is_alive(self) -> bool:
        """Calls may come, or one still runs."""
        return self._thread.is_alive()

    async def close(self, timeout_s: float) -> None:
        """End after the calls sent so far; those that take longer than ``timeout_s`` go on."""
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _unless_done(
    future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object
) -> None:
    if not future.done():
        settle(outcome)

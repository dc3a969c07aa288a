"""Runs the user's functions outside the event loop, so that a hanging call blocks nothing.

It is used for tools (``environment/tools``) and search functions (``retrieval/client``). Callers
handle deadlines and decide what a failure means.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

_MAX_HUNG_THREADS = 32


class TooManyHangError(RuntimeError):
    """Raised instead of calling a function that already has too many hanging calls."""


def make_async(function: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    """Makes ``function``, sync or async and of one argument, an async function.

    Each call of a sync function gets a daemon thread, so it blocks neither the loop nor the exit.
    While ``_MAX_HUNG_THREADS`` calls hang, further calls raise ``TooManyHangError`` at once.
    """
    if inspect.iscoroutinefunction(function):
        return function
    under_way: set[threading.Thread] = set()

    async def run(argument: Any) -> Any:
        if len(under_way) >= _MAX_HUNG_THREADS:
            raise TooManyHangError("too many calls hang")
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # so that an abandoned call can still finish

        def work() -> None:
            settle: Callable[[Any], None]
            try:
                settle, outcome = result.set_result, function(argument)
            except Exception as error:
                settle, outcome = result.set_exception, error
            under_way.discard(thread)
            settle(outcome)

        thread = threading.Thread(target=work, name="tool", daemon=True)
        under_way.add(thread)
        thread.start()
        return await asyncio.wrap_future(result)

    return run

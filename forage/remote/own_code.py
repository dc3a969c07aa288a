"""Makes the user's functions async, so that a call that hangs does not block the event loop.

Custom tools (``environment/tools``), custom searches (``retrieval/client``) and trackers are called
through this. Callers set deadlines and decide what a failure means.
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
    """Too many calls of the function have not returned, so it is not called again."""


def as_async(function: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    """Returns ``function``, which takes one argument, as an async function.

    Each call of a sync function runs on its own daemon thread, so that it blocks neither the loop
    nor the exit. After ``_MAX_HUNG_THREADS`` calls that do not return, further calls raise
    ``TooManyHangError`` at once.
    """
    if inspect.iscoroutinefunction(function):
        return function
    under_way: set[threading.Thread] = set()

    async def run(argument: Any) -> Any:
        if len(under_way) >= _MAX_HUNG_THREADS:
            raise TooManyHangError("too many calls hang")
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # so that an abandoned call can still end

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

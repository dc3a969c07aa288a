"""Functions of the user's, run beside the event loop: a call that hangs holds up nothing.

Tools (``environment/tools``) and a search of one's own (``retrieval/client``) are called through
this. Deadlines, and what a failure means, are the caller's.
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
    """So many calls of the function have not come back that it is not called again."""


def run_beside(function: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    """``function`` of one argument as an async one, whether it is async or not.

    Each call of a sync one has a daemon thread of its own, so that it holds up neither the loop
    nor the exit. After ``_MAX_HUNG_THREADS`` that do not come back, further calls raise
    ``TooManyHangError`` at once.
    """
    if inspect.iscoroutinefunction(function):
        return function
    under_way: set[threading.Thread] = set()

    async def run(argument: Any) -> Any:
        if len(under_way) >= _MAX_HUNG_THREADS:
            raise TooManyHangError("too many calls hang")
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # so that a call given up can still end

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

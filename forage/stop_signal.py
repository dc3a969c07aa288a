"""Turns Ctrl-C and SIGTERM into an exception at the places where a run can end.

``train.py`` awaits its long work through ``or_stop``, and writes a checkpoint before it ends.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """Raised when somebody asked the run to end."""


class StopSignal:
    """Whether somebody asked the run to end; used on one event loop."""

    def __init__(self) -> None:
        self._has_come = asyncio.Event()

    def set(self) -> None:
        """Ask the run to end."""
        self._has_come.set()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within the block, SIGINT and SIGTERM ask the run to end instead of killing it."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for signum in signals:
            loop.add_signal_handler(signum, self.set)
        try:
            yield
        finally:
            for signum in signals:
                loop.remove_signal_handler(signum)

    async def or_stop(self, work: Awaitable[T]) -> T:
        """The result of ``work``; raises ``Stopped`` as soon as a signal arrives."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._has_come.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

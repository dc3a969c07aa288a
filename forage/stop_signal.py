"""Ctrl-C and SIGTERM as an exception at the places where a run can end, and nowhere else.

``train.py`` waits for its long work through ``or_stop``, and leaves a checkpoint on the way out.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """Somebody asked the run to end; what was learnt is in the checkpoint."""


class StopSignal:
    """Whether somebody asked the run to end; made on any thread, used on one event loop."""

    def __init__(self) -> None:
        self._has_come = asyncio.Event()

    def set(self) -> None:
        """Ask the run to end."""
        self._has_come.set()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as the wish to end, instead of as the end."""
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
        """The result of ``work``, or ``Stopped`` as soon as a signal came."""
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

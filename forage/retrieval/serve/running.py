"""One HTTP process of the service: runs an application on a socket until it is told to stop.

A stop drains: readiness turns to 503 and new searches are refused (the door does both), those in
flight are answered, then the socket is closed. A second Ctrl-C ends at once.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from forage.retrieval.serve.middleware import Traffic

# Longer than clients keep idle connections, so that it is they who close them.
_KEEP_ALIVE_S = 75


class HttpServer(uvicorn.Server):
    """uvicorn that says when it is ready, drains, and returns after a signal instead of raising."""

    def __init__(
        self, app: Starlette, drain_s: float, on_ready: Callable[[], Awaitable[None]]
    ) -> None:
        """``drain_s``: how long requests in flight are waited for at a stop."""
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,  # what is left then has had its time
        )
        super().__init__(config)
        self._traffic: Traffic = app.state.traffic
        self._drain_s = drain_s
        self._drain_until = 0.0
        self._on_ready = on_ready

    def run_on(self, sock: socket.socket) -> None:
        """Serve on a bound socket until a stop has been drained."""
        self.run(sockets=[sock])

    def stop(self) -> None:
        """Take no new searches, and end when those in flight are answered or out of time."""
        if not self._traffic.is_draining:
            self._traffic.is_draining = True
            self._drain_until = time.monotonic() + self._drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._traffic.is_draining:
            is_late = time.monotonic() >= self._drain_until
            self.should_exit = self.should_exit or is_late or self._traffic.in_flight == 0
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._traffic.is_draining and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        self.stop()

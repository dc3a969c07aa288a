"""``forage serve``: opens what is to be served and answers over HTTP until it is told to stop.

A stop drains: readiness turns to 503, new searches are refused (the middleware does both), those in
flight are answered, then the socket is closed. A second Ctrl-C ends at once. What is answered is
``forage.retrieval.serve.app``'s.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from forage.errors import UserError
from forage.hardware import in_passing_thread
from forage.retrieval.serve.app import AppSettings, create_app
from forage.retrieval.serve.batcher import Batcher
from forage.retrieval.serve.middleware import Traffic
from forage.retrieval.serve.port import bind_port, explain_bind_error
from forage.retrieval.sources.compose import ServeSettings, open_page_store, open_source

logger = logging.getLogger(__name__)

# Longer than clients keep idle connections, so that it is they who close them.
_KEEP_ALIVE_S = 75


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or Ctrl-C, then drain and return; raises ``UserError``.

    The port is taken before anything is opened; 0 takes a free one (the log line names it).
    """
    if settings.token is None and not _is_loopback(settings.host):
        logger.warning(
            "%s can be reached from other machines and no token is set: anybody there may search; "
            "set one with --token-file FILE",
            settings.host,
        )
    if settings.topk > settings.limits.max_topk:
        raise UserError(
            f"--topk {settings.topk} is above --max-topk {settings.limits.max_topk}: a request "
            "that names no topk would be refused; raise one or lower the other"
        )
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(bind_port(settings.host, settings.port)))
        port: int = sock.getsockname()[1]
        source = in_passing_thread(lambda: open_source(settings))

        async def say_ready() -> None:
            passages = "" if source.num_passages is None else f"{source.num_passages} passages of "
            name = f"[{settings.host}]" if ":" in settings.host else settings.host
            logger.info("serving %s%s at http://%s:%d", passages, source.name, name, port)

        is_idle = True
        try:
            pages = open_page_store(settings)
            if pages is not None:
                stack.callback(pages.close)
            app_settings = AppSettings(settings.topk, settings.token, settings.limits)
            app = create_app(source, pages, app_settings, settings.cache_size)
            HttpServer(app, settings.drain_s, say_ready).run(sockets=[sock])
            batcher: Batcher = app.state.batcher
            is_idle = batcher.is_idle
        except OSError as error:  # another server bound the same port while both were loading
            raise explain_bind_error(error, settings.host, port) from error
        finally:
            if is_idle:  # closing files under a search that hangs could only make things worse
                source.close()


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

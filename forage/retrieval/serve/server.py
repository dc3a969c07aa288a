"""``forage serve``: a source, and pages where there are some, over HTTP until it is told to stop.

What it answers is ``search_app``'s. Each signal that would end the process drains instead:
readiness turns to 503, new searches are refused (the application does both), those in flight are
answered, then the socket is closed. A second Ctrl-C ends at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from forage.errors import UserError
from forage.hardware import in_passing_thread, loaded_objects_frozen
from forage.retrieval.serve.batcher import Batcher
from forage.retrieval.serve.connection import Connection
from forage.retrieval.serve.known_hosts import KnownHosts
from forage.retrieval.serve.limits import Limits, Traffic
from forage.retrieval.serve.port import bind_port, explain_bind_error, is_loopback
from forage.retrieval.serve.search_app import AppSettings, create_app
from forage.retrieval.sources.compose import ServeSettings, is_paid, open_page_store, open_source

logger = logging.getLogger(__name__)

# Longer than clients keep idle connections, so that it is they who close them.
_KEEP_ALIVE_S = 75
# Open files apart from connections.
_OTHER_FILES = 128
# Of a terminal that closes, and of schedulers that take the machine back; uvicorn handles SIGTERM
# and SIGINT.
_FURTHER_STOPS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def serve(settings: ServeSettings) -> None:
    """Serve until a signal asks to stop, then drain and return; raises ``UserError``.

    The port is taken before anything is opened; 0 takes a free one (the log line names it).
    """
    if not faulthandler.is_enabled():  # a mapped file that is cut in the midst of a search: SIGBUS
        faulthandler.enable()
    if settings.token is None and not is_loopback(settings.host):
        logger.warning(
            "%s can be reached from other machines and no token is set: anybody there may search; "
            "set one with --token-file FILE",
            settings.host,
        )
    _refuse_open_purse(settings)
    if settings.topk > settings.limits.max_topk:
        raise UserError(
            f"--topk {settings.topk} is above --max-topk {settings.limits.max_topk}: a request "
            "that names no topk would be refused; raise one or lower the other"
        )
    _allow_connections(settings.limits.max_connections)
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
            app_settings = AppSettings(
                settings.topk,
                settings.page_url,
                settings.token,
                settings.limits,
                KnownHosts(settings.host, settings.allow_hosts),
            )
            app = create_app(source, pages, app_settings, settings.cache_size)
            with loaded_objects_frozen():
                server = HttpServer(app, settings.drain_s, say_ready)
                for number in _FURTHER_STOPS:
                    if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                        signal.signal(number, server.handle_exit)
                server.run(sockets=[sock])
            batcher: Batcher = app.state.batcher
            is_idle = batcher.is_idle
            if batcher.damage is not None:
                raise UserError(f"the server has ended: {batcher.damage}")
        except OSError as error:  # another server bound the same port while both were loading
            raise explain_bind_error(error, settings.host, port) from error
        finally:
            if is_idle:  # closing files under a search that hangs could only make things worse
                source.close()


def _refuse_open_purse(settings: ServeSettings) -> None:
    """Raise ``UserError`` where whoever reaches the server would spend money."""
    has_token, costs_money = settings.token is not None, is_paid(settings)
    if costs_money and not has_token and not settings.no_token:
        raise UserError(
            f"searches of {', '.join(settings.sources)} cost money, and without a token whoever "
            f"reaches {settings.host} may search: name one with --token-file FILE, or say "
            "--no-token"
        )
    if settings.no_token and (has_token or not costs_money):
        why = "a token is given" if has_token else "only web:PROVIDER needs a token"
        raise UserError(f"--no-token has no effect: {why}; leave it out")


def _allow_connections(number: int) -> None:
    """Raise this process's limit of open files, which is often 1024, or say that it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHER_FILES
    is_enough = hard == resource.RLIM_INFINITY or hard >= wanted
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if is_enough else hard, hard))
    if not is_enough:
        logger.warning(
            "this process may open %d files and would need %d for %d connections; raise `ulimit -n`"
            " or lower --max-connections",
            *(hard, wanted, number),
        )


class HttpServer(uvicorn.Server):
    """uvicorn that says when it is ready, drains, and returns after a signal instead of raising."""

    def __init__(
        self, app: Starlette, drain_s: float, on_ready: Callable[[], Awaitable[None]]
    ) -> None:
        """``drain_s``: how long requests in flight are waited for at a stop."""
        limits: Limits = app.state.limits
        config = uvicorn.Config(
            app,
            # It is called as a class would be.
            http=cast(Any, partial(Connection, limits, app.state.traffic.connections)),
            ws="none",  # a connection that changed its protocol would be counted for ever
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,  # what is left then has had its time
        )
        super().__init__(config)
        self._traffic: Traffic = app.state.traffic
        self._batcher: Batcher = app.state.batcher
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
        if self._batcher.damage is not None:
            self.stop()
        if self._traffic.is_draining:
            is_late = time.monotonic() >= self._drain_until
            self.should_exit = self.should_exit or is_late or self._traffic.num_open == 0
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._traffic.is_draining and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        self.stop()

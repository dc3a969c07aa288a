"""``forage serve``: opens what is to be served and answers over HTTP until told to stop.

One process by default; with ``workers``, ``forage.retrieval.serve.http_workers`` runs several. What
is answered is the application's, how a process runs and stops is
``forage.retrieval.serve.running``'s.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable

from forage.errors import UserError
from forage.hardware import in_passing_thread
from forage.retrieval.serve.app import AppSettings, build_app
from forage.retrieval.serve.batcher import Batcher
from forage.retrieval.serve.http_workers import serve_with_fronts
from forage.retrieval.serve.metrics import Figures
from forage.retrieval.serve.port import bind_ports, explain_bind_error
from forage.retrieval.serve.running import HttpServer
from forage.retrieval.source import Source, SourceFacts
from forage.retrieval.sources.compose import ServeSettings, open_page_store, open_source

logger = logging.getLogger(__name__)


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
        socks = bind_ports(settings.host, settings.port, settings.workers)
        for sock in socks:
            stack.enter_context(contextlib.closing(sock))
        port: int = socks[0].getsockname()[1]
        source = in_passing_thread(lambda: open_source(settings))

        async def say_ready() -> None:
            passages = "" if source.num_passages is None else f"{source.num_passages} passages of "
            name = f"[{settings.host}]" if ":" in settings.host else settings.host
            logger.info("serving %s%s at http://%s:%d", passages, source.name, name, port)

        is_idle = True
        try:
            if settings.workers > 1:
                is_idle = serve_with_fronts(settings, source, socks, say_ready)
            else:
                is_idle = _serve_alone(settings, source, socks[0], say_ready)
        except OSError as error:  # another server bound the same port while both were loading
            raise explain_bind_error(error, settings.host, port) from error
        finally:
            if is_idle:  # closing files under a search that hangs could only make things worse
                source.close()


def _serve_alone(
    settings: ServeSettings,
    source: Source,
    sock: socket.socket,
    on_ready: Callable[[], Awaitable[None]],
) -> bool:
    """One process for everything; False if a search still runs when the drain is over."""
    figures = Figures()
    batcher = Batcher(source, figures, cache_size=settings.cache_size)
    pages = open_page_store(settings)
    with contextlib.closing(pages) if pages else contextlib.nullcontext():
        app_settings = AppSettings(settings.topk, settings.token, settings.limits)
        app = build_app(SourceFacts.of(source), batcher, pages, app_settings, figures, batcher)
        HttpServer(app, settings.drain_s, on_ready).run_on(sock)
    return batcher.is_idle


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

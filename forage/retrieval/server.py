"""``forage serve``: opens what is to be served and answers over HTTP until told to stop.

One process by default; with ``workers``, ``forage.retrieval.fronts`` runs several. What is answered
is the application's, how a process runs and stops is ``forage.retrieval.running``'s.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging

from forage.retrieval.app import AppSettings, create_app
from forage.retrieval.compose import ServeSettings, open_page_store, open_source
from forage.retrieval.fronts import serve_with_fronts
from forage.retrieval.port import bind_ports, explain_bind_error
from forage.retrieval.running import HttpServer

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
    socks = bind_ports(settings.host, settings.port, settings.workers)
    with contextlib.ExitStack() as stack:
        for sock in socks:
            stack.enter_context(contextlib.closing(sock))
        port: int = socks[0].getsockname()[1]
        source = open_source(settings)
        stack.callback(source.close)
        pages = open_page_store(settings)
        if pages is not None:
            stack.callback(pages.close)
        passages = "" if source.num_passages is None else f"{source.num_passages} passages of "
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        ready = f"serving {passages}{source.name} at http://{name}:{port}"

        async def say_ready() -> None:
            logger.info(ready)

        try:
            if settings.workers > 1:
                serve_with_fronts(settings, source, socks, say_ready)
            else:
                app = create_app(
                    source,
                    pages,
                    AppSettings(settings.topk, settings.token, settings.limits),
                    cache_size=settings.cache_size,
                )
                server = HttpServer(app, settings.drain_s, say_ready)
                server.run_on(socks[0])
        except OSError as error:  # another server bound the same port while both were loading
            raise explain_bind_error(error, settings.host, port) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

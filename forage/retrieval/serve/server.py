"""``forage serve``: a source, and pages where there are some, over HTTP until it is told to stop.

``RequestMiddleware`` stands before every route, and a ``Batcher`` owns the source. A stop drains:
readiness turns to 503, new searches are refused (the middleware does both), those in flight are
answered, then the socket is closed. A second Ctrl-C ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any, cast

import uvicorn
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forage.errors import UserError
from forage.hardware import in_passing_thread, loaded_objects_spared
from forage.retrieval.serve.api_pages import describe_api, docs_page, page_headers, search_page
from forage.retrieval.serve.batcher import Batcher
from forage.retrieval.serve.bodies import BodyReader, read_json
from forage.retrieval.serve.connection import Connection
from forage.retrieval.serve.known_hosts import KnownHosts
from forage.retrieval.serve.metrics import Figures, prometheus_text
from forage.retrieval.serve.middleware import (
    DEADLINE,
    Limits,
    OverLimit,
    RequestMiddleware,
    Traffic,
    address_of,
    problem,
)
from forage.retrieval.serve.port import bind_port, explain_bind_error, is_loopback
from forage.retrieval.serve.watched_source import WatchedSource
from forage.retrieval.source import Source, SourceError
from forage.retrieval.sources.compose import ServeSettings, is_paid, open_page_store, open_source
from forage.retrieval.sources.stored_pages import Pages, read_pages
from forage.retrieval.wire import (
    WIKIPEDIA_PAGE,
    AccessRequest,
    Page,
    PageChunk,
    RetrieveRequest,
    normalise_query,
    utf8_length,
    write_pages,
    write_reply,
)

logger = logging.getLogger(__name__)

# Longer than clients keep idle connections, so that it is they who close them.
_KEEP_ALIVE_S = 75
# Open files apart from connections.
_OTHER_FILES = 128
# Pages that are read before it is looked how large the reply becomes.
_PAGES_AT_ONCE = 32


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or Ctrl-C, then drain and return; raises ``UserError``.

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
            with loaded_objects_spared():
                HttpServer(app, settings.drain_s, say_ready).run(sockets=[sock])
            batcher: Batcher = app.state.batcher
            is_idle = batcher.is_idle
            watched: WatchedSource = app.state.source
            if watched.damage is not None:
                raise UserError(f"the server has ended: {watched.damage}")
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
        self._source: WatchedSource = app.state.source
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
        if self._source.damage is not None:
            self.stop()
        if self._traffic.is_draining:
            is_late = time.monotonic() >= self._drain_until
            self.should_exit = self.should_exit or is_late or self._traffic.num_open == 0
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._traffic.is_draining and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        self.stop()


@dataclass(frozen=True, slots=True)
class AppSettings:
    """How an application answers; ``topk`` holds where a request names none.

    ``page_url``: where the page of a passage is whose corpus line has no ``url``.
    """

    topk: int = 3
    page_url: str = WIKIPEDIA_PAGE
    token: SecretStr | None = None
    limits: Limits = field(default_factory=Limits)
    hosts: KnownHosts = field(default_factory=KnownHosts)


def create_app(
    source: Source,
    pages: Pages | None = None,
    settings: AppSettings | None = None,
    cache_size: int = 100_000,
) -> Starlette:
    """The application over an open source; ``cache_size``: passages kept in the cache (0: none).

    Its ``state`` holds the ``batcher``, which owns the source, and the ``source``, the ``traffic``
    and the ``limits``.
    """
    service = _Service(source, pages, settings or AppSettings(), cache_size)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.close()
            await service.bodies.close()

    app = Starlette(
        routes=[
            Route("/retrieve", service.retrieve, methods=["POST"]),
            Route("/access", service.access, methods=["POST"]),
            Route("/healthz", service.healthz),
            Route("/readyz", service.readyz),
            Route("/metrics", service.metrics),
            Route("/openapi.json", service.openapi),
            Route("/docs", service.docs),
            Route("/", service.search_page),
        ],
        middleware=[
            Middleware(
                RequestMiddleware,
                service.settings.limits,
                service.settings.token,
                service.settings.hosts,
                service.figures,
                service.traffic,
                service.batcher.seconds_until_one_leaves,
            )
        ],
        exception_handlers={
            HTTPException: _answer_http_error,
            OverLimit: _answer_over_limit,
            SourceError: _answer_source_error,
            Exception: service.answer_bug,
        },
        lifespan=lifespan,
    )
    app.state.batcher, app.state.traffic = service.batcher, service.traffic
    app.state.source = service.source
    app.state.limits = service.settings.limits
    return app


class _Service:
    """The routes, and what they share."""

    def __init__(
        self, source: Source, pages: Pages | None, settings: AppSettings, cache_size: int
    ) -> None:
        self.settings = settings
        self.figures = Figures()
        self.traffic = Traffic(settings.limits)
        self.bodies = BodyReader()
        self.source = WatchedSource(source)
        self.batcher = Batcher(self.source, self.figures, cache_size=cache_size)
        self._probe: asyncio.Task[None] | None = None
        self._pages = pages
        self._description = describe_api(settings.limits, has_token=settings.token is not None)

    async def retrieve(self, request: Request) -> Response:
        address = address_of(request.scope)
        body = await request.body()
        asked, queries = await self.bodies.read(self._read_retrieve, body, address)
        topk = asked.topk or self.settings.topk
        max_bytes = self.settings.limits.max_reply_bytes
        seconds = request.scope[DEADLINE] - asyncio.get_running_loop().time()
        hits_by_query = await self.batcher.search(queries, topk, address, max_bytes, seconds)
        return _json(write_reply(hits_by_query, asked.return_scores, self.settings.page_url))

    def _read_retrieve(self, body: bytes) -> tuple[RetrieveRequest, list[str]]:
        """A request within the limits, and its queries normalised."""
        asked = read_json(RetrieveRequest, body)
        self.settings.limits.check(asked.queries, "queries", asked.topk or 1)
        return asked, [normalise_query(query) for query in asked.queries]

    async def access(self, request: Request) -> Response:
        asked = await self.bodies.read(
            self._read_access, await request.body(), address_of(request.scope)
        )
        if self._pages is None:
            return problem(404, "this server has no pages; start it with --pages FILE")
        limit, num_bytes = self.settings.limits.max_reply_bytes, 0
        found: list[PageChunk | Page | None] = []
        for start in range(0, len(asked.urls), _PAGES_AT_ONCE):
            part = asked.model_copy(update={"urls": asked.urls[start : start + _PAGES_AT_ONCE]})
            pages = (await asyncio.to_thread(read_pages, self._pages, part)).result
            num_bytes += sum(utf8_length(page.contents) for page in pages if page)
            if num_bytes > limit:
                detail = f"the pages have more than {limit} bytes, which a reply may have; ask "
                raise OverLimit(413, f"{detail}for fewer at once, or for parts (max_chars, chunk)")
            found += pages
        return _json(write_pages(found))

    def _read_access(self, body: bytes) -> AccessRequest:
        asked = read_json(AccessRequest, body)
        self.settings.limits.check(asked.urls, "urls")
        return asked

    async def healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(self, _: Request) -> Response:
        if self.traffic.is_draining:
            return problem(503, "the server is stopping")
        source = self.source
        if source.failure is not None:
            if self._probe is None or self._probe.done():
                self._probe = asyncio.create_task(self._try_again())
            return problem(503, f"searches fail: {source.failure}", Retry_After="1")
        return JSONResponse(
            {"status": "ready", "backend": source.name, "passages": source.num_passages}
        )

    async def _try_again(self) -> None:
        """Search as the last time, once a second at most; what comes of it, the source notes."""
        with contextlib.suppress(Exception):
            await self.batcher.run_between_searches(self.source.try_again)
        await asyncio.sleep(1)

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        await self.batcher.close()

    async def metrics(self, _: Request) -> Response:
        text = prometheus_text(self.figures, self.source, self.traffic.in_flight)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(self._description)

    async def docs(self, request: Request) -> Response:
        page = docs_page(self._description, str(request.base_url))
        return HTMLResponse(page, headers=page_headers())

    async def search_page(self, _: Request) -> Response:
        return HTMLResponse(search_page(), headers=page_headers())

    async def answer_bug(self, request: Request, error: Exception) -> Response:
        """Starlette raises ``error`` again behind this reply, so that its traceback is logged."""
        self.figures.count_request(request.url.path, 500)
        return problem(500, f"a fault of the server ({type(error).__name__}); its log says more")


def _json(pieces: Iterator[bytes]) -> Response:
    """A reply in one piece where it has no more, else streamed while it is written."""
    first, second = next(pieces), next(pieces, None)
    if second is None:
        return Response(first, media_type="application/json")

    async def stream() -> AsyncIterator[bytes]:
        for piece in chain((first, second), pieces):
            yield piece
            await asyncio.sleep(0)  # others are served between any two

    return StreamingResponse(stream(), media_type="application/json")


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this error alone"
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def _answer_over_limit(_: Request, error: Exception) -> Response:
    assert isinstance(error, OverLimit), "registered for this error alone"
    return error.reply()


async def _answer_source_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, SourceError), "registered for this error alone"
    logger.warning("the source could not answer: %s", error.reason)
    if error.is_temporary:
        return problem(503, error.reason, Retry_After="1")
    return problem(502, error.reason)

"""The search service: an index over HTTP, for rollouts and for anyone's retrieval client.

``create_app`` is the application (limits, formats, health, figures); ``serve`` runs it until it is
told to stop. Batching is the batcher's, formats are the wire's; training is unknown here.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forage import __version__
from forage.errors import UserError
from forage.retrieval.batcher import Batcher
from forage.retrieval.index import Index, open_index
from forage.retrieval.metrics import ServerMetrics
from forage.retrieval.port import bind_port, explain_bind_error
from forage.retrieval.wire import (
    AccessReply,
    AccessRequest,
    PlainReply,
    Problem,
    RetrieveRequest,
    ScoredReply,
    plain_reply,
    scored_reply,
)

logger = logging.getLogger(__name__)

_DRAIN_S = 10
# Longer than clients keep idle connections, so that it is they who close them.
_KEEP_ALIVE_S = 75
_JSON = "application/json"
_REFUSALS = (400, 413, 422, 429)
_PATHS = frozenset({"/retrieve", "/access", "/healthz", "/readyz", "/metrics"})


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one request may ask for, and how many are answered at once (then: 429)."""

    max_queries: int = 1024
    max_topk: int = 1000
    max_query_chars: int = 20_000
    max_body_bytes: int = 16 * 2**20
    max_in_flight: int = 1024
    cache_size: int = 10_000


def create_app(index: Index, limits: ServerLimits | None = None, default_topk: int = 3) -> FastAPI:
    """The application over an open index; ``default_topk`` holds where a request names none."""
    service = _Service(index, limits or ServerLimits(), default_topk)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.batcher.close()

    app = FastAPI(title="Forage search", version=__version__, lifespan=lifespan)
    problems: dict[int | str, dict[str, Any]] = {status: {"model": Problem} for status in _REFUSALS}
    add = app.add_api_route
    add(
        "/retrieve",
        service.retrieve,
        methods=["POST"],
        response_model=ScoredReply | PlainReply,
        responses=problems,
    )
    add(
        "/access",
        service.access,
        methods=["POST"],
        response_model=AccessReply,
        responses={501: {"model": Problem}},
    )
    add("/healthz", service.healthz, methods=["GET"])
    add("/readyz", service.readyz, methods=["GET"])
    add("/metrics", service.metrics_text, methods=["GET"])
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_middleware(
        _Watch, metrics=service.metrics, max_body_bytes=service.limits.max_body_bytes
    )
    return app


class _Service:
    """The handlers, and what they share."""

    def __init__(self, index: Index, limits: ServerLimits, default_topk: int) -> None:
        self._index = index
        self.limits = limits
        self._default_topk = default_topk
        self._num_in_flight = 0
        self.batcher = Batcher(index, cache_size=limits.cache_size)
        self.metrics = ServerMetrics(len(index), lambda: self.batcher.counts)

    async def retrieve(self, request: RetrieveRequest) -> Response:
        """For each query the best passages, with scores or without."""
        topk = self._default_topk if request.topk is None else request.topk
        self._check(request.queries, topk)
        if self._num_in_flight >= self.limits.max_in_flight:
            raise HTTPException(
                429,
                f"{self._num_in_flight} requests are in flight; try again in a second",
                headers={"Retry-After": "1"},
            )
        self._num_in_flight += 1
        self.metrics.in_flight.inc()
        started = time.perf_counter()
        try:
            hits = await self.batcher.search(request.queries, topk)
        finally:
            self._num_in_flight -= 1
            self.metrics.in_flight.dec()
        reply = scored_reply(hits) if request.return_scores else plain_reply(hits)
        self.metrics.seconds.observe(time.perf_counter() - started)
        return Response(reply.model_dump_json(), media_type=_JSON)

    async def access(self, request: AccessRequest) -> Response:
        """The pages behind addresses; this server was given none."""
        raise HTTPException(
            501, f"this server has no pages, so it cannot open {len(request.urls)} addresses"
        )

    async def healthz(self) -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    async def readyz(self) -> dict[str, str | int]:
        """The index is loaded and searches are answered."""
        return {
            "status": "ready",
            "backend": self._index.manifest.backend,
            "passages": len(self._index),
        }

    async def metrics_text(self) -> Response:
        """Figures in Prometheus' text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _check(self, queries: list[str], topk: int) -> None:
        limits = self.limits
        if len(queries) > limits.max_queries:
            raise HTTPException(
                413, f"{len(queries)} queries in one request; at most {limits.max_queries}"
            )
        if topk > limits.max_topk:
            raise HTTPException(400, f"topk is {topk}; at most {limits.max_topk}")
        for number, query in enumerate(queries):
            if len(query) > limits.max_query_chars:
                raise HTTPException(
                    413,
                    f"queries[{number}] has {len(query)} characters; "
                    f"at most {limits.max_query_chars}",
                )


class _Watch:
    """Counts every request by path and status, and stops reading a body that is too large."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, max_body_bytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"
        num_bytes = 0

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(
                    413,
                    f"the body is larger than {self._max_body_bytes} bytes; send fewer queries",
                    headers={"Connection": "close"},
                )
            return message

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive_within_limit, send_and_count)


async def _answer_invalid(_: Request, error: Exception) -> Response:
    """What is wrong with a request's JSON, in words; its own text is not sent back."""
    assert isinstance(error, RequestValidationError), "registered for this error alone"
    wrong: list[dict[str, Any]] = list(error.errors())
    reasons = [f"{'.'.join(str(part) for part in w['loc'])}: {w['msg']}" for w in wrong[:5]]
    return JSONResponse({"detail": "; ".join(reasons)}, 422)


def serve(
    index_dir: Path, host: str = "127.0.0.1", port: int = 8000, default_topk: int = 3
) -> None:
    """Serve an index until SIGTERM or Ctrl-C, then drain and return; raises ``UserError``.

    The port is taken before the index is loaded; 0 takes a free one (the log line names it).
    """
    if default_topk < 1:
        raise UserError(f"topk is {default_topk}; it must be 1 or more")
    sock = bind_port(host, port)
    with contextlib.closing(sock), open_index(index_dir) as index:
        config = uvicorn.Config(
            create_app(index, default_topk=default_topk),
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        real_port = sock.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        ready = f"serving {len(index)} passages at http://{name}:{real_port}"
        try:
            _Server(config, ready).run(sockets=[sock])
        except OSError as error:  # another server bound the same port while both were loading
            raise explain_bind_error(error, host, real_port) from error


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, and returns after a signal instead of raising it."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        logger.info(self._ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

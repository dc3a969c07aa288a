"""The door of the service: who may come in, how many at once, with how much, and for how long.

Runs before a request's body is read, so that what is refused costs next to nothing. A POST is work:
limits and deadline are for work. Counts every request by path and status. What a request asks for
is checked behind it, by the handlers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forage.retrieval.serve.bearer_token import is_token
from forage.retrieval.serve.limits import Limits
from forage.retrieval.serve.metrics import Figure, Figures

# What needs no token; everything else does, however its path is spelt.
_OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/healthz", "/readyz"})


@dataclass(slots=True)
class Traffic:
    """What is going on: requests in flight, and whether the server takes new ones."""

    in_flight: int = 0
    is_draining: bool = False


class _BodyTooLarge(Exception):
    """Raised where the body is read, answered at the door."""


def problem(status: int, detail: str, **headers: str) -> Response:
    """A refusal in the wire format; ``headers`` with ``_`` for ``-``."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"detail": detail}, status, named)


class Door:
    """ASGI middleware around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        token: SecretStr | None,
        figures: Figures,
        traffic: Traffic,
    ) -> None:
        self._app = app
        self._limits = limits
        self._token = token
        self._figures = figures
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        status = 0

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._figures.count_request(path, status)
            await send(message)

        headers = Headers(scope=scope)
        is_work = scope["method"] == "POST"
        refusal = self._refusal(path, headers, is_work)
        if refusal is not None:
            await refusal(scope, receive, send_noting_status)
        elif is_work:
            started = time.perf_counter()
            await self._work(scope, receive, send_noting_status)
            if path == "/retrieve" and status == 200:
                self._figures.observe_retrieve(time.perf_counter() - started)
        else:
            await self._app(scope, receive, send_noting_status)

    def _refusal(self, path: str, headers: Headers, is_work: bool) -> Response | None:
        """Why a request is not let in, or None."""
        if self._token is not None and path not in _OPEN_PATHS:
            authorization = headers.get("authorization", "").encode("utf-8", "replace")
            if not is_token(self._token, authorization):
                what = "this token is not the server's" if authorization else "a token is needed"
                return problem(
                    401, f"{what}: Authorization: Bearer TOKEN", WWW_Authenticate="Bearer"
                )
        if not is_work:
            return None
        traffic, limits = self._traffic, self._limits
        if traffic.is_draining:
            return problem(503, "the server is stopping", Retry_After="1", Connection="close")
        if traffic.in_flight >= limits.max_in_flight:
            detail = f"{traffic.in_flight} requests are in flight; try again in a second"
            return problem(429, detail, Retry_After="1")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > limits.max_body_bytes:
            return self._too_large()
        return None

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, and see that it leaves within its time."""
        num_bytes = 0
        has_started = False

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limits.max_body_bytes:
                raise _BodyTooLarge
            return message

        async def send_noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        self._come(1)
        deadline = asyncio.timeout(self._limits.deadline_s)
        try:
            async with deadline:
                await self._app(scope, receive_within_limit, send_noting_start)
        except _BodyTooLarge:
            await self._too_large()(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody is left to be answered
        except TimeoutError:
            if not deadline.expired() or has_started:
                raise
            late = problem(504, f"not answered within {self._limits.deadline_s:g} s")
            await late(scope, receive, send)
        finally:
            self._come(-1)

    def _come(self, change: int) -> None:
        self._traffic.in_flight += change
        self._figures.add(Figure.IN_FLIGHT, change)

    def _too_large(self) -> Response:
        detail = f"the body is larger than {self._limits.max_body_bytes} bytes; send fewer queries"
        return problem(413, detail, Connection="close")

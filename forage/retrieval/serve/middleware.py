"""What every request passes before a route: known names, bearer token, limits, deadline, counts.

It runs before a request's body is read, so a refusal costs next to nothing. Limits and the deadline
hold for POST requests alone, which make the server work. What a request asks for is checked by the
routes, against the same ``Limits``.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import Field, SecretStr
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forage.remote.secret import is_token
from forage.retrieval.serve.known_hosts import KnownHosts
from forage.retrieval.serve.metrics import Figures
from forage.settings import Strict

_JSON = "application/json"
# Paths that need no token; every other path does, however it is spelt.
_OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/healthz", "/readyz"})


# Pages are large: a body full of short addresses could ask for terabytes.
_MAX_URLS = 1024


# Seconds that a client waits: https://www.rfc-editor.org/rfc/rfc7240#section-4.3
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d+(?:\.\d+)?)")
DEADLINE = "forage.deadline"


class OverLimit(Exception):
    """A request beyond a limit: the HTTP status and a sentence that names the limit.

    ``retry_after_s``: when the same request will be within it.
    """

    def __init__(self, status: int, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s = status, detail, retry_after_s

    def reply(self) -> Response:
        """How it is said over HTTP."""
        if self.retry_after_s is None:
            return problem(self.status, self.detail)
        return problem(self.status, self.detail, Retry_After=whole_seconds(self.retry_after_s))


class Limits(Strict):
    """What one request may ask for; a request beyond a limit is refused, never cut.

    Each limit is an option of ``forage serve``. Without ``max_queries`` a request may hold as many
    queries as its body's size allows.
    """

    max_queries: int | None = Field(default=None, ge=1)
    max_topk: int = Field(default=1000, ge=1)
    max_query_chars: int = Field(default=20_000, ge=1)
    max_body_bytes: int = Field(default=16 * 2**20, ge=1)
    max_reply_bytes: int = Field(default=64 * 2**20, ge=1)
    max_in_flight: int = Field(default=1024, ge=1)
    deadline_s: float = Field(default=600.0, gt=0)

    @property
    def max_urls(self) -> int:
        """Addresses of one request to ``/access``."""
        return self.max_queries or _MAX_URLS

    def check(self, texts: Sequence[str], name: str, topk: int = 1) -> None:
        """Raise ``OverLimit`` for too many texts, one too long, or too large a ``topk``.

        ``name``: what the texts are called in the request, ``queries`` or ``urls``.
        """
        most = self.max_urls if name == "urls" else self.max_queries
        if most is not None and len(texts) > most:
            raise OverLimit(413, f"{len(texts)} {name} in one request; at most {most}")
        if topk > self.max_topk:
            raise OverLimit(400, f"topk is {topk}; at most {self.max_topk}")
        for number, text in enumerate(texts):
            if len(text) > self.max_query_chars:
                raise OverLimit(
                    413,
                    f"{name}[{number}] has {len(text)} characters; at most {self.max_query_chars}",
                )


@dataclass(slots=True)
class Traffic:
    """Requests in flight, and whether the server is stopping."""

    in_flight: int = 0
    is_draining: bool = False


class _BodyTooLarge(Exception):
    """Raised while the body is read, answered by the middleware."""


def whole_seconds(seconds: float) -> str:
    """For ``Retry-After``: rounded up, and never at once."""
    return str(max(1, math.ceil(seconds)))


def problem(status: int, detail: str, **headers: str) -> Response:
    """A refusal in the wire format; ``headers`` with ``_`` for ``-``."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"detail": detail}, status, named)


class RequestMiddleware:
    """ASGI middleware around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        token: SecretStr | None,
        hosts: KnownHosts,
        figures: Figures,
        traffic: Traffic,
        seconds_until_one_leaves: Callable[[], float],
    ) -> None:
        """``seconds_until_one_leaves``: when a request in flight will be through."""
        self._app, self._limits, self._token, self._hosts = app, limits, token, hosts
        self._figures, self._traffic = figures, traffic
        self._seconds_until_one_leaves = seconds_until_one_leaves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        status = num_bytes = 0
        started = time.perf_counter()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._figures.count_request(path, status)
            await send(message)

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limits.max_body_bytes:
                raise _BodyTooLarge
            return message

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_noting_status)
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send_noting_status)
            return
        self._traffic.in_flight += 1
        seconds = self._seconds_for(scope)
        deadline = asyncio.timeout(seconds)
        scope[DEADLINE] = asyncio.get_running_loop().time() + seconds
        try:
            async with deadline:
                await self._app(scope, receive_within_limit, send_noting_status)
        except _BodyTooLarge:
            await self._too_large()(scope, receive, send_noting_status)
        except ClientDisconnect:
            pass  # nobody is left to be answered
        except TimeoutError:
            if not deadline.expired() or status:
                raise
            late = problem(504, f"not answered within {seconds:g} s")
            await late(scope, receive, send_noting_status)
        finally:
            self._traffic.in_flight -= 1
        if path == "/retrieve" and status == 200:
            self._figures.observe_retrieve(time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is refused before its body is read, or None."""
        headers = Headers(scope=scope)
        stranger = self._hosts.refusal(headers)
        if stranger is not None:
            return problem(403, stranger)
        if self._token is not None and scope["path"] not in _OPEN_PATHS:
            authorization = headers.get("authorization", "").encode("utf-8", "replace")
            if not is_token(self._token, authorization):
                what = "this token is not the server's" if authorization else "a token is needed"
                return problem(
                    401, f"{what}: Authorization: Bearer TOKEN", WWW_Authenticate="Bearer"
                )
        if scope["method"] != "POST":
            return None
        traffic, limits = self._traffic, self._limits
        if traffic.is_draining:
            return problem(503, "the server is stopping", Retry_After="1", Connection="close")
        if traffic.in_flight >= limits.max_in_flight:
            wait = whole_seconds(self._seconds_until_one_leaves())
            detail = f"{traffic.in_flight} requests are in flight; the next may come in {wait} s"
            return problem(429, detail, Retry_After=wait)
        # A page elsewhere may send other types without asking, and this one never.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            return problem(415, f"the body's type has to be said: Content-Type: {_JSON}")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > limits.max_body_bytes:
            return self._too_large()
        return None

    def _seconds_for(self, scope: Scope) -> float:
        """The time that a request has: its client's own (``Prefer: wait=SECONDS``), or less."""
        wait = _WAIT.search(Headers(scope=scope).get("prefer", ""))
        return min(float(wait[1]), self._limits.deadline_s) if wait else self._limits.deadline_s

    def _too_large(self) -> Response:
        detail = f"the body is larger than {self._limits.max_body_bytes} bytes; send fewer queries"
        return problem(413, detail, Connection="close")

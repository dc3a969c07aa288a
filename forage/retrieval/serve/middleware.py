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
from collections import Counter
from collections.abc import Callable, Sequence

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
# How slowly a body may come, and how many of the largest size are held at once.
_BYTES_PER_S = 2**16
_LARGEST_BODIES = 32


class OverLimit(Exception):
    """A request beyond a limit: the HTTP status and a sentence that names the limit.

    ``retry_after_s``: when the same request will be within it.
    """

    def __init__(self, status: int, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s = status, detail, retry_after_s

    def reply(self, is_last: bool = False) -> Response:
        """How it is said over HTTP; ``is_last``: the connection ends, since its body does not."""
        headers = {"Connection": "close"} if is_last else {}
        if self.retry_after_s is not None:
            headers["Retry_After"] = whole_seconds(self.retry_after_s)
        return problem(self.status, self.detail, **headers)


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
    max_connections: int = Field(default=4096, ge=1)
    patience_s: float = Field(default=10.0, gt=0)

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


class Room:
    """Something that addresses share: one of them has three quarters of it at most."""

    def __init__(self, size: int) -> None:
        self._size, self._share = size, math.ceil(0.75 * size)
        self._taken: Counter[str] = Counter()
        self.total = 0

    def has(self, address: str, amount: int = 1) -> bool:
        """Whether so much is left for this address."""
        is_left = self.total + amount <= self._size
        return is_left and self._taken[address] + amount <= self._share

    def take(self, address: str, amount: int = 1) -> bool:
        """Take it, if it is there."""
        if not self.has(address, amount):
            return False
        self._taken[address] += amount
        self.total += amount
        return True

    def give(self, address: str, amount: int = 1) -> None:
        """Give back what was taken."""
        self.total -= amount
        self._taken[address] -= amount
        if not self._taken[address]:
            del self._taken[address]


class Traffic:
    """What requests take up, and whether the server is stopping."""

    def __init__(self, limits: Limits) -> None:
        self.connections = Room(limits.max_connections)
        # Requests whose bodies have come: slow bodies keep nobody out.
        self.places = Room(limits.max_in_flight)
        self.body_bytes = Room(_LARGEST_BODIES * limits.max_body_bytes)
        self.num_open = 0
        self.is_draining = False

    @property
    def in_flight(self) -> int:
        """Requests that have come whole and are not answered yet."""
        return self.places.total


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
        status = 0
        started = time.perf_counter()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._figures.count_request(path, status)
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_noting_status)
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send_noting_status)
            return
        seconds = self._seconds_for(scope)
        deadline = asyncio.timeout(seconds)
        scope[DEADLINE] = asyncio.get_running_loop().time() + seconds
        self._traffic.num_open += 1
        try:
            async with deadline:
                await self._answer(scope, receive, send_noting_status)
        except OverLimit as refused:  # of the body; the application answers its own
            await refused.reply(is_last=True)(scope, receive, send_noting_status)
        except ClientDisconnect:
            pass  # nobody is left to be answered
        except TimeoutError:
            if not deadline.expired() or status:
                raise
            late = problem(504, f"not answered within {seconds:g} s")
            await late(scope, receive, send_noting_status)
        finally:
            self._traffic.num_open -= 1
        if path == "/retrieve" and status == 200:
            self._figures.observe_retrieve(time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, and let the application answer as soon as there is a place."""
        address, traffic = address_of(scope), self._traffic
        body = bytearray()
        try:
            await self._read_into(body, receive, address)
            if not traffic.places.take(address):
                raise self._too_many()
            try:
                await self._app(scope, _receive_again(bytes(body), receive), send)
            finally:
                traffic.places.give(address)
        finally:
            traffic.body_bytes.give(address, len(body))

    async def _read_into(self, body: bytearray, receive: Receive, address: str) -> None:
        """Read a body; raises ``OverLimit`` where it is too large, too slow or too many.

        It has ``patience_s``, and a second more for each ``_BYTES_PER_S`` that came.
        """
        limits, started = self._limits, asyncio.get_running_loop().time()
        patience = asyncio.timeout(limits.patience_s)
        try:
            async with patience:
                is_whole = False
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    piece: bytes = message.get("body", b"")
                    if len(body) + len(piece) > limits.max_body_bytes:
                        raise self._too_large()
                    if not self._traffic.body_bytes.take(address, len(piece)):
                        raise self._too_many()
                    body += piece
                    is_whole = not message.get("more_body", False)
                    if not is_whole:
                        so_far_s = limits.patience_s + len(body) / _BYTES_PER_S
                        patience.reschedule(started + so_far_s)
        except TimeoutError:
            if not patience.expired():
                raise
            raise OverLimit(408, f"the body came too slowly: {len(body)} bytes so far") from None

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
        if not traffic.places.has(address_of(scope)):
            return self._too_many().reply()
        # A page elsewhere may send other types without asking, and this one never.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            return problem(415, f"the body's type has to be said: Content-Type: {_JSON}")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > limits.max_body_bytes:
            return self._too_large().reply(is_last=True)
        return None

    def _seconds_for(self, scope: Scope) -> float:
        """The time that a request has: its client's own (``Prefer: wait=SECONDS``), or less."""
        wait = _WAIT.search(Headers(scope=scope).get("prefer", ""))
        return min(float(wait[1]), self._limits.deadline_s) if wait else self._limits.deadline_s

    def _too_large(self) -> OverLimit:
        limit = self._limits.max_body_bytes
        return OverLimit(413, f"the body is larger than {limit} bytes; send fewer queries")

    def _too_many(self) -> OverLimit:
        seconds = self._seconds_until_one_leaves()
        said = f"{self._traffic.in_flight} requests are in flight"
        return OverLimit(429, f"{said}; the next may come in {whole_seconds(seconds)} s", seconds)


def address_of(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def _receive_again(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, and then what the connection says."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again

"""Web servers in separate threads: providers with one fault each, and web pages."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from forage.retrieval.serve.port import bind_port
from forage.retrieval.web.loop_thread import LoopThread

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    params: dict[str, str]
    body: str

    @property
    def query(self) -> str:
        """The query, wherever the provider expects it."""
        if self.body:
            return json.loads(self.body)["q"]
        return next(self.params[name] for name in ("q", "p", "text") if name in self.params)


@dataclass
class WebServer:
    """A running server; ``behaviour`` answers every request and may be replaced."""

    behaviour: Handler
    url: str = ""
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    most_at_once: int = 0
    _num_at_once: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = (await request.read()).decode()
        self.seen.append(
            Seen(request.method, request.path, dict(request.headers), dict(request.query), body)
        )
        self._num_at_once += 1
        self.most_at_once = max(self.most_at_once, self._num_at_once)
        try:
            return await self.behaviour(request)
        finally:
            self._num_at_once -= 1

    @property
    def queries(self) -> list[str]:
        return [seen.query for seen in self.seen]


@contextmanager
def serving(behaviour: Handler, host: str = "127.0.0.1") -> Iterator[WebServer]:
    """A server on a free loopback port until the end of the block."""
    server = WebServer(behaviour)
    thread = LoopThread("web-server")

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        sock = bind_port(host, 0)
        server.port = sock.getsockname()[1]
        server.url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
        await web.SockSite(runner, sock).start()
        return runner

    runner = thread.run(start())
    try:
        yield server
    finally:
        thread.run(runner.cleanup())
        thread.close()


def serper_reply(query: str, num: int = 10, url: str = "https://example.org") -> dict[str, Any]:
    """A reply of serper.dev: ``num`` results that name the query."""
    organic = [
        {
            "title": f"{query} {i}",
            "link": f"{url}/{query.replace(' ', '-')}/{i}",
            "snippet": f"About {query} ({i}).",
            "position": i + 1,
        }
        for i in range(num)
    ]
    return {"searchParameters": {"q": query}, "organic": organic, "credits": 1}


async def answers(request: web.Request) -> web.Response:
    """serper.dev with three results per query."""
    return web.json_response(serper_reply((await request.json())["q"], num=3))


async def hangs(_: web.Request) -> web.Response:
    await asyncio.sleep(3600)
    raise AssertionError("nobody waits this long")


def replies(body: str | bytes, status: int = 200, **headers: str) -> Handler:
    """Always returns this body and status."""
    data = body.encode() if isinstance(body, str) else body
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def behaviour(_: web.Request) -> web.Response:
        return web.Response(body=data, status=status, headers=named)

    return behaviour


def fails_first(num_failures: int, fault: Handler, then: Handler = answers) -> Handler:
    """``fault`` for the first requests, ``then`` from then on."""
    num_seen = 0

    async def behaviour(request: web.Request) -> web.StreamResponse:
        nonlocal num_seen
        num_seen += 1
        return await (fault if num_seen <= num_failures else then)(request)

    return behaviour


def faulty_for(word: str, fault: Handler) -> Handler:
    """``fault`` for queries that contain ``word``, answers for the others."""

    async def behaviour(request: web.Request) -> web.StreamResponse:
        return await (fault if word in (await request.json())["q"] else answers)(request)

    return behaviour

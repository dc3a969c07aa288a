"""Search servers with one fault each, for the client's tests: real HTTP on a loopback port."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from forage.retrieval.serve.port import bind_port

Behaviour = Callable[[web.Request, list[str]], Awaitable[web.StreamResponse]]


class FaultServer:
    """Answers every ``POST`` with ``behaviour``; records the queries (or addresses) of each."""

    def __init__(self, behaviour: Behaviour, has_readyz: bool = True) -> None:
        self.behaviour = behaviour
        self.has_readyz = has_readyz
        self.requests: list[list[str]] = []
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens; after ``stop`` on the same port again."""
        app = web.Application()
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_post("/access", self._retrieve)
        if self.has_readyz:
            app.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        sock = bind_port("127.0.0.1", self.port)
        self.port = sock.getsockname()[1]
        await web.SockSite(self._runner, sock).start()

    async def stop(self) -> None:
        """Refuses connections from now on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        queries = asked.get("queries", asked.get("urls"))
        self.requests.append(queries)
        return await self.behaviour(request, queries)


@asynccontextmanager
async def running(behaviour: Behaviour, has_readyz: bool = True) -> AsyncIterator[FaultServer]:
    """A started ``FaultServer``, stopped at the end."""
    server = FaultServer(behaviour, has_readyz)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def echo(queries: list[str]) -> web.Response:
    """A correct answer: one passage per query, whose text is the query."""
    found = [
        [{"document": {"id": "1", "contents": f'"T"\n{query}'}, "score": 1.5}] for query in queries
    ]
    return web.json_response({"result": found})


async def answers(_: web.Request, queries: list[str]) -> web.Response:
    return echo(queries)


async def drops_the_connection(request: web.Request, _: list[str]) -> web.StreamResponse:
    assert request.transport is not None, "the request has a connection"
    request.transport.close()
    return web.Response()


async def breaks_off(request: web.Request, _: list[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"result": [[')
    assert request.transport is not None, "the request has a connection"
    request.transport.close()
    return response


async def hangs(_: web.Request, __: list[str]) -> web.Response:
    await asyncio.sleep(3600)
    raise AssertionError("nobody waits this long")


def replies(body: str | bytes, status: int = 200, **headers: str) -> Behaviour:
    """Always returns this body and status."""
    data = body.encode() if isinstance(body, str) else body

    async def behaviour(_: web.Request, __: list[str]) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=data, status=status, headers=named)

    return behaviour


def has_a_wrong_length(_: web.Request, queries: list[str]) -> Awaitable[web.Response]:
    """One result too few."""
    return answers(_, queries[1:])


def fails_first(num_failures: int, fault: Behaviour) -> Behaviour:
    """``fault`` for the first requests, correct answers from then on."""
    num_seen = 0

    async def behaviour(request: web.Request, queries: list[str]) -> web.StreamResponse:
        nonlocal num_seen
        num_seen += 1
        if num_seen <= num_failures:
            return await fault(request, queries)
        return echo(queries)

    return behaviour


def refuses_queries_with(word: str) -> Behaviour:
    """400 for a request in which any query contains ``word``."""

    async def behaviour(_: web.Request, queries: list[str]) -> web.Response:
        if any(word in query for query in queries):
            return web.json_response({"detail": f"no {word} here"}, status=400)
        return echo(queries)

    return behaviour


def as_search_r1(documents_by_query: dict[str, list[str]], has_scores: bool) -> Behaviour:
    """The formats of Search-R1's own server: ``contents`` documents, with scores or plain."""

    async def behaviour(_: web.Request, queries: list[str]) -> web.Response:
        found: list[list[dict[str, object]]] = []
        for query in queries:
            documents = [{"id": "9", "contents": c} for c in documents_by_query[query]]
            scored: list[dict[str, object]] = [{"document": d, "score": 0.5} for d in documents]
            found.append(scored if has_scores else [dict(d) for d in documents])
        return web.Response(text=json.dumps({"result": found}), content_type="application/json")

    return behaviour

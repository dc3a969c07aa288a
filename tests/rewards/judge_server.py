"""A real HTTP server like an OpenAI-compatible endpoint, with faults on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class JudgeServer:
    """Sends one of ``replies`` per request, repeating the last one.

    A reply is a text, an HTTP status (optionally with a body), raw bytes, or None for no reply.
    """

    replies: list[Any]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self._reply(request)
        finally:
            self.num_open -= 1

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply is None:
            await self.release.wait()
            reply = "yes"
        if isinstance(reply, tuple):
            status, body, more = reply
            return web.Response(status=status, text=body, headers=more)
        if isinstance(reply, bytes):
            return web.Response(body=reply, content_type="application/json")
        message = {"role": "assistant", "content": reply}
        body = json.dumps({"choices": [{"index": 0, "message": message}]})
        return web.Response(text=body, content_type="application/json")

    @property
    def prompts(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]


@asynccontextmanager
async def judge_server(*replies: Any) -> AsyncIterator[JudgeServer]:
    """The server at ``/v1/chat/completions`` on a free port."""
    server = JudgeServer(list(replies))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        server.release.set()
        await runner.cleanup()

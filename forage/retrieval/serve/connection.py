"""One connection to the server, as uvicorn speaks it, and what happens when it is lost.

uvicorn reads and writes HTTP/1.1; a client that leaves while it is answered takes its request with
it, so that nothing is searched for nobody. What is answered is the application's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState


class Connection(HttpToolsProtocol):
    """uvicorn's protocol; a request ends with its connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._app = self.app
        self.app = self._answer
        self._answering: asyncio.Task[Any] | None = None
        self._is_lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_lost = True
        if self._answering is not None:
            self._answering.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._answering = asyncio.current_task()
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._is_lost:
                raise
        finally:
            self._answering = None

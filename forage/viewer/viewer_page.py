"""Pages of the viewer over HTTP, on this machine alone: headers keep them harmless.

Unlike the report, the pages of the viewer load scripts and styles, from the viewer alone.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from forage.errors import UserError
from forage.retrieval.serve.port import is_loopback
from forage.viewer.pages import content_security_policy, render_page

LOG = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

ROWS_PER_PAGE = 50
LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def loopback_app(title: str, **how: Any) -> FastAPI:
    """An app with no route yet but ``/static``, which answers under this machine's names alone."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None, **how)
    # A page elsewhere whose name resolves to this machine must not read the records.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_NAMES)
    app.mount("/static", StaticFiles(directory=STATIC))
    return app


@dataclass(frozen=True, slots=True)
class Paging:
    """Where a page of a list stands; its fields are what the template's pager reads."""

    page: int
    num_pages: int
    earlier: str
    later: str

    @classmethod
    def of(cls, num_rows: int, asked: int, address: Callable[[int], str]) -> Self:
        """The page that was asked for, or the one nearest to it that there is."""
        num_pages = max(1, -(-num_rows // ROWS_PER_PAGE))
        page = min(max(asked, 1), num_pages)
        earlier = address(page - 1) if page > 1 else ""
        return cls(page, num_pages, earlier, address(page + 1) if page < num_pages else "")

    @property
    def first(self) -> int:
        """The number of its first row."""
        return (self.page - 1) * ROWS_PER_PAGE


def beside_address(places: Sequence[tuple[str, str, int]]) -> str:
    """Where the episodes at (run, file, offset) stand side by side."""
    names = ("run", "file", "offset")
    pairs = [(name, v) for place in places for name, v in zip(names, place, strict=True)]
    return f"/beside?{urlencode(pairs)}"


def missing_page(text: str, here: str = "") -> HTMLResponse:
    return viewer_page("missing.html", status_code=404, here=here, text=text)


def viewer_page(template: str, status_code: int = 200, **values: object) -> HTMLResponse:
    policy = content_security_policy(has_server=True)
    html = render_page(template, policy=policy, **values).encode("utf-8", "replace")
    headers = {"Content-Security-Policy": policy}
    return HTMLResponse(html, status_code=status_code, headers=headers)


def check_loopback(host: str, port: int) -> None:
    """Raises ``UserError`` for a host that other machines reach."""
    if not is_loopback(host):
        raise UserError(
            f"host {host} can be reached from other machines, and these pages ask for no password: "
            f"use 127.0.0.1, and from elsewhere a tunnel such as ssh -L {port}:127.0.0.1:{port}"
        )


async def serve_pages(app: FastAPI, listener: socket.socket, what: str) -> None:
    """Serve pages until interrupted, and log their address."""
    listener.listen()  # who reads the address may come at once
    host, port = listener.getsockname()[:2]
    LOG.info("%s: http://%s:%d", what, f"[{host}]" if ":" in host else host, port)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    await uvicorn.Server(config).serve(sockets=[listener])

"""Pages of the viewer over HTTP, on this machine alone: headers keep them harmless.

Unlike the report, the pages of the viewer load scripts and styles, from the viewer alone.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from forage.errors import UserError
from forage.retrieval.serve.port import is_loopback
from forage.viewer.pages import content_security_policy, render_page

LOG = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def viewer_page(template: str, status_code: int = 200, **values: object) -> HTMLResponse:
    """The rendered page."""
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

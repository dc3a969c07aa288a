"""``forage view``: read-only web pages over runs, their episodes and evaluations."""

from __future__ import annotations

import asyncio
import logging
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forage.commands.arguments import add_address, local_path
from forage.errors import UserError
from forage.retrieval.serve.port import bind_port, is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

LOG = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    text = "output_dir of a run, a folder of runs, or the file of an evaluation"
    parser.add_argument("paths", type=local_path, nargs="+", metavar="PATH", help=text)
    add_address(parser, 8100)


def run(args: Namespace) -> int:
    view(args.paths, args.host, args.port)
    return 0


def view(paths: Sequence[Path], host: str = "127.0.0.1", port: int = 8100) -> None:
    """Serve the pages until interrupted; raises ``UserError`` for a bad host or a taken port."""
    check_loopback(host, port)
    from forage.viewer.viewer_app import create_app

    app = create_app(paths)
    with bind_port(host, port) as listener:
        names = ", ".join(map(str, paths))
        asyncio.run(serve_pages(app, listener, f"viewer of {names}"))


def check_loopback(host: str, port: int) -> None:
    """Raises ``UserError`` for a host that other machines reach."""
    if not is_loopback(host):
        raise UserError(
            f"host {host} can be reached from other machines, and these pages ask for no password: "
            f"use 127.0.0.1, and from elsewhere a tunnel such as ssh -L {port}:127.0.0.1:{port}"
        )


async def serve_pages(app: FastAPI, listener: socket.socket, what: str) -> None:
    """Serve pages until interrupted, and log their address."""
    import uvicorn

    listener.listen()  # who reads the address may come at once
    host, port = listener.getsockname()[:2]
    LOG.info("%s: http://%s:%d", what, f"[{host}]" if ":" in host else host, port)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    await uvicorn.Server(config).serve(sockets=[listener])

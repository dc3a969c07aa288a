"""``forage view``: shows runs, their episodes and evaluations as read-only web pages."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from forage.commands.arguments import add_address, local_path
from forage.retrieval.serve.port import bind_port


def add_arguments(parser: ArgumentParser) -> None:
    text = "output_dir of a run, a folder of runs, or the file of an evaluation"
    parser.add_argument("paths", type=local_path, nargs="+", metavar="PATH", help=text)
    add_address(parser, 8100)


def run(args: Namespace) -> int:
    view(args.paths, args.host, args.port)
    return 0


def view(paths: Sequence[Path], host: str = "127.0.0.1", port: int = 8100) -> None:
    """Serves the pages until interrupted; raises ``UserError`` for a bad host or a taken port."""
    from forage.viewer.viewer_app import create_app
    from forage.viewer.viewer_page import check_loopback, serve_pages

    check_loopback(host, port)
    app = create_app(paths)
    with bind_port(host, port) as listener:
        names = ", ".join(map(str, paths))
        asyncio.run(serve_pages(app, listener, f"viewer of {names}"))

"""``forage view``: read-only web pages over runs, their episodes and evaluations."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from forage.commands.arguments import add_address
from forage.errors import UserError
from forage.retrieval.serve.port import bind_port, is_loopback

LOG = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    text = "output_dir of a run, a folder of runs, or the file of an evaluation"
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help=text)
    add_address(parser, 8100)


def run(args: Namespace) -> int:
    view(args.paths, args.host, args.port)
    return 0


def view(paths: Sequence[Path], host: str = "127.0.0.1", port: int = 8100) -> None:
    """Serve the pages until interrupted; raises ``UserError`` for a bad host or a taken port."""
    if not is_loopback(host):
        raise UserError(
            f"host {host} can be reached from other machines, and the viewer asks for no password: "
            "use 127.0.0.1, and from elsewhere a tunnel such as ssh -L 8100:127.0.0.1:8100"
        )
    import uvicorn

    from forage.viewer.viewer_app import create_app

    app = create_app(paths)
    with bind_port(host, port) as listener:
        shown_host = f"[{host}]" if ":" in host else host
        names = ", ".join(map(str, paths))
        LOG.info("viewer of %s: http://%s:%d", names, shown_host, listener.getsockname()[1])
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])

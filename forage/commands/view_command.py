"""``forage view``: read-only web pages over the records of a run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from forage.commands.arguments import add_address


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's output_dir")
    add_address(parser, 8100)


def run(args: Namespace) -> int:
    from forage.viewer.viewer_app import view

    view(args.run_dir, args.host, args.port)
    return 0

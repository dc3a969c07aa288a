"""``forage settings``: prints every key of a recipe with its type, default and description."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from forage.config.run_config import RunConfig
from forage.config.settings_text import all_paths, keys_of
from forage.errors import UserError, did_you_mean


def add_arguments(parser: ArgumentParser) -> None:
    text = "a section or a key, for example algorithm.advantage (default: all)"
    parser.add_argument("section", nargs="?", default="", metavar="SECTION", help=text)


def run(args: Namespace) -> int:
    keys = keys_of(RunConfig, args.section)
    if not keys:
        paths = all_paths(RunConfig)
        name = args.section.rpartition(".")[2]
        same = [path for path in paths if path.rpartition(".")[2] == name]
        hint = did_you_mean(same[0] if same else args.section, paths)
        raise UserError(f"there is no section or key {args.section!r} in the settings{hint}")
    sys.stdout.write("\n".join(map(str, keys)) + "\n")
    return 0

"""``forage export``: writes a checkpoint, of Forage or another trainer, for Hugging Face."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from pathlib import Path

from forage.commands.arguments import DTYPES, count
from forage.config.config_file import read_tree
from forage.errors import UserError

LOG = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help="the run's output_dir")
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write the model to")
    text = "optimizer step of the checkpoint to write (default: the newest checkpoint)"
    add("--step", type=count, help=text)
    text = "write only the LoRA adapters, not merged into the model"
    add("--adapter", action="store_true", help=text)
    text = "data type to write the weights in (default: as stored)"
    add("--dtype", choices=DTYPES, help=text)
    text = (
        "instead of RUN_DIR: a checkpoint of veRL, SkyRL, slime, RLinf or prime-rl; "
        "docs/checkpoints.md shows the layouts"
    )
    add("--from", type=Path, dest="source", metavar="DIR", help=text)
    text = (
        "with --from: the model whose config and tokenizer to use (default: those in the "
        "checkpoint)"
    )
    add("--base", metavar="MODEL", help=text)
    text = "upload the model to this repository of the Hugging Face Hub (new ones are private)"
    add("--push", metavar="OWNER/NAME", help=text)


def run(args: Namespace) -> int:
    if (args.run_dir is None) == (args.source is None):
        raise UserError("name a run's output_dir, or another trainer's checkpoint with --from")
    if args.source is not None and (args.step is not None or args.adapter):
        raise UserError("--step and --adapter need a Forage run; --from names a single checkpoint")
    if args.source is None and args.base is not None:
        raise UserError("--base requires --from; a Forage run has its own config and tokenizer")
    from forage.commands.model_card import create_repository, push, write_card
    from forage.training.export import export_model, import_checkpoint

    if args.push is not None:
        create_repository(args.push)
    if args.source is None:
        export_model(args.run_dir, args.out, args.step, args.adapter, args.dtype)
        config = read_tree(args.run_dir / "config.yaml")
        write_card(args.out, config, config.get("model", {}).get("path"))
    else:
        import_checkpoint(args.source, args.out, args.base, args.dtype)
        write_card(args.out, None, args.base)
    if args.push is not None:
        LOG.info("Uploaded to %s", push(args.out, args.push))
    return 0

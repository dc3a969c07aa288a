"""``forage export``: a checkpoint of a run as a model directory of Hugging Face."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from forage.commands.arguments import count


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="the run's output_dir")
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write the model to")
    text = "optimizer step of the checkpoint to write (default: the newest checkpoint)"
    add("--step", type=count, help=text)
    text = "write the LoRA adapters alone, not merged into the model"
    add("--adapter", action="store_true", help=text)


def run(args: Namespace) -> int:
    from forage.training.checkpoint import export_model

    export_model(args.run_dir, args.out, args.step, adapter_only=args.adapter)
    return 0

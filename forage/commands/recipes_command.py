"""``forage recipes``: lists or copies the recipes that ship with Forage."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from forage.config.shipped_recipes import FOLDERS, copy_shipped, recipes


def add_arguments(parser: ArgumentParser) -> None:
    text = (
        "directory to copy all recipes, examples and the receiver for vLLM servers to, so that you "
        "can change them (default: only list the recipes)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)


def run(args: Namespace) -> int:
    from rich.console import Console

    console = Console()
    if args.out is not None:
        copy_shipped(args.out)
        console.print(f"Copied {', '.join(FOLDERS)} to {args.out}", soft_wrap=True)
        return 0
    for name, file in recipes().items():
        about = "the small twin, for CPUs" if name.startswith("cpu/") else _about(file)
        console.print(f"[bold]{name}[/bold]  {about}", soft_wrap=True, highlight=False)
    console.print("Run one by its name: forage train NAME --dry-run", highlight=False)
    return 0


def _about(file: Path) -> str:
    """The first sentence of the comment at the top of a recipe."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or not line.strip("# "):
            break
        lines.append(line.strip("# "))
    sentence, _, _ = " ".join(lines).partition(". ")
    return sentence.removesuffix(".")

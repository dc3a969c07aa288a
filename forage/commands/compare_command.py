"""``forage compare``: pairs two evaluations by question, and prints and writes the comparison."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from forage.disk.whole_writes import write_whole_text
from forage.errors import UserError
from forage.evaluation.comparison import Comparison, compare
from forage.evaluation.report.comparison_tables import (
    comparison_table,
    left_out_text,
    played_lines,
    settings_table,
    write_comparison_markdown,
)
from forage.evaluation.report.figure_table import to_rich
from forage.evaluation.result import read_result
from forage.viewer.evaluation_pages import write_comparison_page


def add_arguments(parser: ArgumentParser) -> None:
    text = "figures written by `forage eval`"
    parser.add_argument("first", type=Path, metavar="A.json", help=text)
    text = "figures of another evaluation of the same questions"
    parser.add_argument("second", type=Path, metavar="B.json", help=text)
    text = "file to write the comparison to: a page, Markdown or JSON, by its suffix"
    parser.add_argument("--out", type=Path, metavar="FILE.html|.md|.json", help=text)


def run(args: Namespace) -> int:
    run_comparison(args.first, args.second, args.out)
    return 0


def run_comparison(first: Path, second: Path, out: Path | None) -> Comparison:
    """Prints the tables and writes ``out`` in the format of its suffix; raises ``UserError``."""
    if out is not None and out.suffix not in (".html", ".md", ".json"):
        raise UserError(f"--out is {out}, but must end in .html, .md or .json")
    names = _short_names(first, second)
    comparison = compare(read_result(first), read_result(second), names)
    if out is not None:  # before the tables, because stdout may be closed
        _write(out, comparison)
    console = Console()
    for line in played_lines(comparison):
        console.print(line, highlight=False)
    for arm in comparison.arms:
        table = comparison_table(arm, comparison, is_wide=False)
        console.print(to_rich(table, console.width))
        if left_out := left_out_text(arm, comparison):
            console.print(left_out)
    settings = settings_table(comparison)
    if settings is not None:
        console.print(to_rich(settings))
    if out is not None:
        console.print(f"Wrote {out}", highlight=False, soft_wrap=True)
    return comparison


def _write(out: Path, comparison: Comparison) -> None:
    match out.suffix:
        case ".html":
            write_comparison_page(out, comparison)
        case ".md":
            write_comparison_markdown(out, comparison)
        case _:
            write_whole_text(out, json.dumps(asdict(comparison), indent=1))


def _short_names(first: Path, second: Path) -> tuple[str, str]:
    """Names that distinguish the two files: the file name, with as many folders as needed."""
    one, other = first.with_suffix("").parts, second.with_suffix("").parts
    for length in range(1, max(len(one), len(other)) + 1):
        names = "/".join(one[-length:]), "/".join(other[-length:])
        if names[0] != names[1]:
            return names
    return "A", "B"

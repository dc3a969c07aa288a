"""Compares Forage with the strongest anchors, one row each, and writes anchors.md.

    make anchors vllm                                       # the packages to compare with
    python benchmarks/anchors.py --quick                    # about a quarter of an hour
    python benchmarks/anchors.py --quick --rows bm25,dense  # these rows; the page keeps the others
    python benchmarks/anchors.py                            # full sizes, more rounds
    python benchmarks/anchors.py --page                     # only write the page again

A row whose packages are not installed says so in the table. The results are in anchors.json; what
stops a figure from reaching its aim is written by hand in anchors/notes.md and kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.anchors.page import (
    page_of,
    read_notes,
    read_records,
    write_records,
)
from benchmarks.anchors.rows import ROWS, measured
from benchmarks.anchors.side import ROOT, has_environment

FOLDER = Path(__file__).parent
QUICK_ROUNDS, FULL_ROUNDS = 3, 7


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, three rounds")
    parser.add_argument("--rows", help=f"some of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, help="rounds that count, after one that does not")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "anchors", help="kept")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    args = parser.parse_args()
    names = args.rows.split(",") if args.rows else [] if args.page else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]}; there are {', '.join(ROWS)}")
    if not has_environment():
        print("Packages that only the anchors need are missing: make anchors", flush=True)
    file = FOLDER / "anchors.json"
    num_rounds = args.rounds or (QUICK_ROUNDS if args.quick else FULL_ROUNDS)
    for name in names:
        print(f"{name}: {ROWS[name].title}", flush=True)
        record = measured(ROWS[name], args.out, args.quick, num_rounds)
        write_records(file, read_records(file) | {name: record})
        write_page(file)  # a later row that is interrupted costs none of the earlier ones
    write_page(file)


def write_page(file: Path) -> None:
    """Writes anchors.md from the records in ``file`` and the notes."""
    titles = {name: row.title for name, row in ROWS.items()}
    page = page_of(titles, read_records(file), read_notes(FOLDER / "anchors" / "notes.md"))
    (FOLDER / "anchors.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

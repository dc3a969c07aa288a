"""Writes ``benchmarks/anchors.md`` from the records of all rows and the hand-written notes.

``notes.md`` has a section per row (``## name``); the script only reads it. What it says stands
below the row's figures, and an aim that is missed refers to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.anchors.figure import Figure, RowRecord, record_of, tree_of

_INTRODUCTION = """\
# The strongest anchors

<!-- written by benchmarks/anchors.py from anchors.json and anchors/notes.md: do not edit -->

Each row compares Forage with the strongest version of another program that its users would run.
Every side runs in a separate process, with the settings that its documentation recommends;
the sections below name them. Within a run the sides alternate, and their order is reversed from
round to round. A ratio is the median over the rounds, with the lowest and the highest in brackets;
above 1, Forage is faster (for a share: Forage's share of the rate).

    make anchors vllm                                     # what Forage is compared with
    python benchmarks/anchors.py --quick                  # all rows
    python benchmarks/anchors.py --quick --rows bm25,http # some rows; the others stay as they are

"""
_HEAD = ("row", "what", "anchor", "aim", "ratio", "rounds", "Forage", "anchor's", "")


def read_records(path: Path) -> dict[str, RowRecord]:
    """The records of earlier runs, by row; none if there is no file."""
    if not path.exists():
        return {}
    tree = json.loads(path.read_text(encoding="utf-8"))
    return {name: record_of(each) for name, each in tree.items()}


def write_records(path: Path, records: Mapping[str, RowRecord]) -> None:
    tree = {name: tree_of(record) for name, record in records.items()}
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def read_notes(path: Path) -> dict[str, str]:
    """The hand-written sections, by row."""
    if not path.exists():
        return {}
    parts = re.split(r"^## (.+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name.strip(): text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def page_of(
    titles: Mapping[str, str], records: Mapping[str, RowRecord], notes: Mapping[str, str]
) -> str:
    """The whole page: one table of all figures, then a section per row in the order of titles."""
    lines = [_cells(_HEAD), _cells(("---",) * len(_HEAD))]
    sections: list[str] = []
    for name, title in titles.items():
        record = records.get(name)
        lines += _lines(name, record, notes.get(name))
        sections.append(_section(name, title, record, notes.get(name)))
    return _INTRODUCTION + "\n".join(lines) + "\n\n" + "\n\n".join(sections) + "\n"


def _lines(name: str, record: RowRecord | None, note: str | None) -> list[str]:
    link = f"[{name}](#{name})"
    if record is None:
        return [_cells((link, "not measured yet", *[""] * (len(_HEAD) - 2)))]
    if record.failure:
        return [_cells((link, f"not measured: {record.failure}", *[""] * (len(_HEAD) - 2)))]
    return [_cells((link, *_columns(figure, f"#{name}", note))) for figure in record.figures]


def _columns(figure: Figure, link: str, note: str | None) -> Sequence[str]:
    aim = "" if figure.aim is None else f"{'at most ' * figure.is_most}{_short(figure.aim)}"
    if not figure.ours:
        return (figure.what, figure.anchor, aim, "not measured", "", "", "", figure.missing)
    ratios = figure.ratios
    ratio = f"{_short(figure.ratio)} [{_short(min(ratios))}, {_short(max(ratios))}]"
    values = [
        f"{_long(median(side))} {figure.unit}".strip() for side in (figure.ours, figure.theirs)
    ]
    verdict = {True: "reached", None: ""}.get(figure.is_reached, "missed")
    if verdict == "missed" and note is not None:
        verdict = f"missed: [what stops it]({link})"
    if figure.is_reached:
        ratio = f"**{ratio}**"
    return (figure.what, figure.anchor, aim, ratio, f"{len(ratios)}", *values, verdict)


def _section(name: str, title: str, record: RowRecord | None, note: str | None) -> str:
    parts = [f"## {name}\n\n{title}"]
    if record is not None:
        said = record.conditions
        parts.append(
            f"Measured on {said['machine']}, {said['date']} UTC, at {said['commit']}, "
            f"{said['size']}; load {said['load']}, other programs used {said['others']} of the "
            f"cores' time. It took {said['minutes']} minutes."
        )
        rows = [_cells(("side", "settings", "chosen or found at start", "versions"))]
        rows.append(_cells(("---",) * 4))
        for side in record.sides:
            found = ", ".join(f"{key} {value}" for key, value in side.found.items())
            versions = ", ".join(f"{key} {value}" for key, value in side.versions.items())
            rows.append(_cells((side.name, side.settings, found, versions)))
        if record.sides:
            parts.append("\n".join(rows))
    if note is not None:
        parts.append(f"**What stops it, and limitations.** {note}")
    return "\n\n".join(parts)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _long(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

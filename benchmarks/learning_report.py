"""Reports the results of ``learning.py``: tables in Markdown, and the curves as one SVG.

    python benchmarks/learning_report.py runs/learning
    python benchmarks/learning_report.py runs/learning --page benchmarks/learning.md

The first command prints the tables; the second writes them into a page, between its two marks, and
writes the curves next to it. It reads the figures of finished trials and names the missing ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

TRIALS_FILE = Path(__file__).with_name("learning.yaml")
START, END = "<!-- tables: start -->", "<!-- tables: end -->"
GROUPS = ("estimators", "losses", "ablations", "staleness")
HEAD = (
    "trial",
    "EM at the target's step",
    "EM at the end",
    "episodes to the target",
    "relative to the target",
    "within twice the episodes",
    "searches",
    "minutes on one core",
)
DETAILS = {
    "loss/clip_fraction": "clipped {:.2%} of tokens",
    "policy/staleness": "{:.2f} updates stale",
    "correction/cut_fraction": "truncated {:.3%} of tokens",
    "loss/observed_fraction": "{:.0%} of trained tokens observed",
    "critic/explained_variance": "explained variance {:.2f}",
}
PANEL_WIDTH, PANEL_HEIGHT, NUM_COLUMNS = 190, 140, 5
LEFT, RIGHT, TOP, BOTTOM = 30, 14, 24, 22
LOWEST_EM = 0.2


@dataclass(frozen=True, slots=True)
class Curve:
    """One trial with one seed: (step, episodes, EM, searches) at each evaluation.

    ``target`` is the reference's exact match at ``target_steps``; None for the default, which has
    no reference.
    """

    name: str
    group: str
    reference: str
    seed: int
    target: float | None
    target_steps: int
    reached_after: int | None
    points: tuple[tuple[int, int, float, float], ...]
    training: dict[str, float]
    error: str | None
    cpu_seconds: float

    @staticmethod
    def read(path: Path) -> Curve:
        """Raises ``KeyError`` if ``learning.py`` did not write the file."""
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Curve(
            name=row["name"],
            group=row["group"],
            reference=row["reference"],
            seed=row["seed"],
            target=row["target"],
            target_steps=row["target_steps"],
            reached_after=row["reached_after"],
            points=tuple((step, episodes, em, s) for step, episodes, em, s in row["points"]),
            training=row["training"],
            error=row["error"],
            cpu_seconds=row["cpu_seconds"],
        )

    @property
    def em_at_target(self) -> float | None:
        """Exact match at the step at which the reference set the target."""
        return next((em for step, _, em, _ in self.points if step == self.target_steps), None)


def read_curves(out: Path) -> dict[str, list[Curve]]:
    """The existing curves of each trial, one per seed."""
    curves = [Curve.read(path) for path in sorted(out.glob("seed-*/*/figures.json"))]
    by_name: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=lambda c: (GROUPS.index(c.group), c.seed)):
        by_name.setdefault(curve.name, []).append(curve)
    return by_name


def target_episodes(reference: Sequence[Curve]) -> int:
    """The reference's number of episodes at the step that set the target."""
    curve = reference[0]
    return next(episodes for step, episodes, _, _ in curve.points if step == curve.target_steps)


def row(curves: Sequence[Curve], allowed: int) -> list[str]:
    """A trial's cells, with all seeds in each. ``allowed`` is the target's number of episodes."""
    first = curves[0]
    reached = [curve.reached_after for curve in curves]
    is_compared = first.target is not None
    num_within = sum(after is not None and after <= 2 * allowed for after in reached)
    return [
        first.name,
        " / ".join(number(curve.em_at_target) for curve in curves),
        " / ".join(f"{curve.points[-1][2]:.3f}" if curve.points else "none" for curve in curves),
        " / ".join(str(after) if after else "no" for after in reached) if is_compared else "",
        " / ".join(f"{after / allowed:.1f}" if after else "-" for after in reached)
        if is_compared
        else "",
        f"{num_within} of {len(curves)}" if is_compared else "",
        " / ".join(f"{curve.points[-1][3]:.2f}" if curve.points else "none" for curve in curves),
        f"{fmean(curve.cpu_seconds for curve in curves) / 60:.1f}",
    ]


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def details(curves: Sequence[Curve]) -> list[str]:
    """The trial's metrics, as means over steps and seeds, and its failures."""
    found = [
        text.format(fmean(values))
        for name, text in DETAILS.items()
        if (values := [c.training[name] for c in curves if name in c.training]) and any(values)
    ]
    return found + [f"seed {c.seed} failed: {c.error}" for c in curves if c.error]


def table(by_name: dict[str, list[Curve]], group: str) -> str:
    """The Markdown table of a group, and below it the details of those trials that have any."""
    trials = {name: curves for name, curves in by_name.items() if curves[0].group == group}
    if not trials:
        return "No trial has been run."
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for curves in trials.values():
        allowed = target_episodes(by_name[curves[0].reference])
        lines.append("| " + " | ".join(row(curves, allowed)) + " |")
    notes = [f"- {name}: {', '.join(d)}" for name, c in trials.items() if (d := details(c))]
    return "\n".join([*lines, "", *notes])


def missing(by_name: dict[str, list[Curve]], names: Sequence[str], num_seeds: int) -> str:
    """A sentence that lists what has not been run, seed by seed."""
    parts: list[str] = []
    for seed in range(num_seeds):
        there = {name for name, curves in by_name.items() if any(c.seed == seed for c in curves)}
        absent = [name for name in names if name not in there]
        if absent:
            parts.append(f"seed {seed}: {'all' if not there else '; '.join(absent)}")
    return "All trials have been run." if not parts else f"Not run: {'. '.join(parts)}."


def tables(by_name: dict[str, list[Curve]], names: Sequence[str], num_seeds: int) -> str:
    """All tables, in Markdown."""
    parts = [f"### {group.capitalize()}\n\n{table(by_name, group)}" for group in GROUPS]
    return "\n\n".join([missing(by_name, names, num_seeds), *parts])


def put_between_marks(page: str, text: str) -> str:
    """The page with ``text`` between its two marks; raises ``ValueError`` if they are missing."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no {START} with a {END} after it")
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


def svg(by_name: dict[str, list[Curve]], start_em: float) -> str:
    """One panel per trial: its seeds, and behind them those of its reference."""
    num_rows = -(-len(by_name) // NUM_COLUMNS)
    width, height = NUM_COLUMNS * PANEL_WIDTH, num_rows * PANEL_HEIGHT
    most = max(points[1] for curves in by_name.values() for c in curves for points in c.points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="9">',
        "<title>Held-out exact match over episodes, each trial with its reference</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for index, curves in enumerate(by_name.values()):
        line, column = divmod(index, NUM_COLUMNS)
        parts.append(f'<g transform="translate({column * PANEL_WIDTH},{line * PANEL_HEIGHT})">')
        parts += panel(curves, by_name[curves[0].reference], start_em, most)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def panel(
    curves: Sequence[Curve], reference: Sequence[Curve], start_em: float, most: int
) -> list[str]:
    """The marks of one panel."""
    right, bottom = PANEL_WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM
    marks = [
        f'<text x="{LEFT}" y="15" font-size="11" fill="#1a1a1a">{escape(curves[0].name)}</text>'
    ]
    for em in (0.4, 0.6, 0.8, 1.0):
        y = height_of(em)
        marks.append(f'<line x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#e4e4e4"/>')
        marks.append(
            f'<text x="{LEFT - 4}" y="{y + 3}" text-anchor="end" fill="#666666">{em:.1f}</text>'
        )
    for episodes in (0, most // 2, most):
        x = LEFT + (right - LEFT) * episodes / most
        marks.append(
            f'<text x="{x}" y="{bottom + 12}" text-anchor="middle" fill="#666666">{episodes}</text>'
        )
    styles = [("#b8b8b8", 1.2, reference), ("#1f6fb4", 1.6, curves)]
    for colour, thickness, drawn in styles[curves is reference :]:
        for curve in drawn:
            corners = [(0, start_em), *((episodes, em) for _, episodes, em, _ in curve.points)]
            points = " ".join(
                f"{LEFT + (right - LEFT) * episodes / most:.1f},{height_of(em)}"
                for episodes, em in corners
            )
            marks.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" '
                f'stroke-width="{thickness}"/>'
            )
    return marks


def height_of(em: float) -> float:
    """The position of an exact match in its panel, in pixels from the top."""
    share = (max(em, LOWEST_EM) - LOWEST_EM) / (1 - LOWEST_EM)
    return round(PANEL_HEIGHT - BOTTOM - share * (PANEL_HEIGHT - BOTTOM - TOP), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables and curves of the learning benchmark.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="how many are expected")
    parser.add_argument("--page", type=Path, help="write tables into it, and curves next to it")
    args = parser.parse_args()
    by_name = read_curves(args.out)
    if not by_name:
        raise SystemExit(f"{args.out} contains no finished trial of learning.py")
    groups = yaml.safe_load(TRIALS_FILE.read_text(encoding="utf-8"))
    names = [name for group in GROUPS for name in groups[group]]
    by_name = {name: by_name[name] for name in names if name in by_name}
    text = tables(by_name, names, args.seeds)
    if args.page is None:
        print(text)
        return
    page = args.page.read_text(encoding="utf-8")
    args.page.write_text(put_between_marks(page, text), encoding="utf-8")
    start = json.loads((args.out / "start.json").read_text(encoding="utf-8"))
    args.page.with_suffix(".svg").write_text(svg(by_name, start["em"]), encoding="utf-8")


if __name__ == "__main__":
    main()

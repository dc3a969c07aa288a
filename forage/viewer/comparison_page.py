"""The page of a paired comparison: one HTML file, a chart and a table for each arm.

A comparison goes in, a page comes out. Nothing here pairs or resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forage.evaluation.comparison import ComparedArm, ComparedSlice, Comparison
from forage.evaluation.intervals import Interval
from forage.evaluation.report.comparison_tables import (
    compared_arm_name,
    comparison_table,
    left_out_text,
    p_text,
    played_lines,
    settings_table,
    signed_cell,
)
from forage.evaluation.report.figure_table import FigureTable, figure_text
from forage.evaluation.report.labels import hops_text, source_name
from forage.viewer.charts import IntervalChart, IntervalRow, interval_chart
from forage.viewer.pages import render_page, write_page
from forage.viewer.report import Card


@dataclass(frozen=True, slots=True)
class ShownArm:
    """An arm as the page shows it."""

    name: str
    cards: list[Card]
    chart: IntervalChart
    table: FigureTable
    left_out: str


def write_comparison_page(path: Path, comparison: Comparison) -> None:
    """Write the page, replacing an older one in one move; raises ``OSError``."""
    write_page(path, render_comparison_page(comparison))


def render_comparison_page(comparison: Comparison) -> str:
    """The page as a text."""
    arms = [
        ShownArm(
            compared_arm_name(arm, comparison),
            _cards(arm, comparison),
            _chart(arm),
            comparison_table(arm, comparison, is_wide=True),
            left_out_text(arm, comparison),
        )
        for arm in comparison.arms
    ]
    return render_page(
        "comparison.html",
        comparison=comparison,
        played=played_lines(comparison),
        arms=arms,
        settings=settings_table(comparison),
    )


def _cards(arm: ComparedArm, comparison: Comparison) -> list[Card]:
    whole = arm.macro or arm.overall
    em, searches = whole.figure("em"), whole.figure("searches")
    cell = signed_cell(em.difference.interval)
    over = "all questions" if arm.macro is None else f"mean of {len(arm.by_source)} sources"
    return [
        Card("Exact match, difference", cell.text, f"95 % interval {cell.detail}, {over}"),
        Card("p-value", p_text(em.difference.p_value), "were there no difference"),
        Card("Exact match", f"{figure_text(em.first, 3)} → {figure_text(em.second, 3)}", over),
        Card("Searches a question", f"{searches.first:.2f} → {searches.second:.2f}", over),
    ]


def _chart(arm: ComparedArm) -> IntervalChart:
    slices = [("all questions", arm.overall, True)]
    if arm.macro is not None:
        slices.append(("mean of sources", arm.macro, True))
        slices += [(source_name(s.source or ""), s, False) for s in arm.by_source]
    slices += [(hops_text(s.num_hops or 0), s, False) for s in arm.by_hops]
    rows = [IntervalRow(label, None, _em(part), is_head) for label, part, is_head in slices]
    reach = _round_up(max(max(abs(_em(p).low), abs(_em(p).high)) for _, p, _ in slices))
    return interval_chart(rows, "difference in exact match", ("", "difference"), (-reach, reach))


def _em(part: ComparedSlice) -> Interval:
    return part.figure("em").difference.interval


def _round_up(reach: float) -> float:
    """The next of some round numbers, so that the ticks are round too."""
    return next((r for r in (0.02, 0.04, 0.1, 0.2, 0.4, 0.6, 0.8) if r >= reach), 1.0)

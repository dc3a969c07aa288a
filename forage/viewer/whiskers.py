"""The geometry of a chart of intervals: rows in; dots with whiskers, in pixels, out.

``templates/chart.html`` writes the shapes as SVG, as it does those of ``charts.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forage.evaluation.intervals import Interval
from forage.viewer.axes import Axis, Tick
from forage.viewer.charts import BOTTOM, Label

_WIDTH = 440
_ROW_HEIGHT = 30


@dataclass(frozen=True, slots=True)
class IntervalRow:
    """A row of the interval chart; ``is_head`` marks an arm, as opposed to a part of one."""

    label: str
    before: Interval | None
    after: Interval | None
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class Whisker:
    style: str
    low: float
    high: float
    mean: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class IntervalChart:
    """Dots with whiskers on an axis."""

    summary: str
    x_label: str
    x_ticks: tuple[Tick, ...]
    rows: tuple[tuple[Label, bool], ...]
    whiskers: tuple[Whisker, ...]
    width: int
    height: int
    left: int
    right: int
    bottom: float


def interval_chart(
    rows: Sequence[IntervalRow],
    x_label: str,
    names: tuple[str, str] = ("before", "after"),
    bounds: tuple[float, float] = (0.0, 1.0),
) -> IntervalChart:
    """One row for each slice, with ``before`` above ``after``, on an axis between ``bounds``."""
    longest = max((len(row.label) for row in rows), default=0)
    left, right, top = max(138, 9 * longest), _WIDTH - 14, 6
    low, high = bounds
    axis = Axis(low, high, left, right)
    labels: list[tuple[Label, bool]] = []
    whiskers: list[Whisker] = []
    for index, row in enumerate(rows):
        middle = top + _ROW_HEIGHT * (index + 0.5)
        style = "head" if row.is_head else "part"
        labels.append((Label(left - 10, middle, row.label, style), row.is_head and index > 0))
        both = row.before is not None and row.after is not None
        for style, name, interval, offset in (
            ("before", names[0], row.before, -5),
            ("after", names[1], row.after, 5),
        ):
            if interval is not None:
                y = middle + (offset if both else 0)
                whiskers.append(_whisker(style, f"{row.label}, {name}", interval, axis, y))
    bottom = top + _ROW_HEIGHT * len(rows)
    ticks = (low + (high - low) * n / 4 for n in range(5))
    return IntervalChart(
        summary="; ".join(w.text for w in whiskers),
        x_label=x_label,
        x_ticks=tuple(Tick(axis.place(x), f"{x:.2g}") for x in ticks),
        rows=tuple(labels),
        whiskers=tuple(whiskers),
        width=_WIDTH,
        height=bottom + BOTTOM,
        left=left,
        right=right,
        bottom=bottom,
    )


def _whisker(style: str, label: str, interval: Interval, axis: Axis, y: float) -> Whisker:
    low, high, mean = interval.low, interval.high, interval.mean
    text = f"{label}: {mean:.3f} [{low:.3f}, {high:.3f}]"
    return Whisker(style, axis.place(low), axis.place(high), axis.place(mean), y, text)

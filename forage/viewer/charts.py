"""The geometry of charts over steps: series in; ticks, lines and areas in pixels out.

``templates/chart.html`` writes the shapes as SVG. No markup is made here, so the template escapes
every text. Nothing here knows what a metric means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from forage.viewer.axes import Axis, Tick, number_text, round_axis

WIDTH, HEIGHT = 380, 214
LEFT, TOP, BOTTOM = 46, 10, 34
# Room on the right: for the names at the ends of lines, or half a tick's text.
_NAMES_ROOM, _BARE_ROOM = 64, 16
_LABEL_GAP = 14.0
_MOST_POINTS = 4 * WIDTH
"""A line of more points is thinned to those that can be seen."""


@dataclass(frozen=True, slots=True)
class Series:
    """A named line: ``style`` is its CSS class; a NaN in ``y_T`` is a gap."""

    name: str
    style: str
    x_T: tuple[float, ...]
    y_T: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """Corners joined by a line, in SVG's form of ``points``; without a weight, around an area."""

    style: str
    weight: str
    points: str


@dataclass(frozen=True, slots=True)
class Label:
    x: float
    y: float
    text: str
    style: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A whole chart, ready to be drawn; the page's script reads ``hover_json``.

    ``metrics`` are the names under which its figures were logged.
    """

    title: str
    y_label: str
    x_label: str
    note: str
    summary: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    hover_json: str
    right: int
    lines: tuple[Line, ...] = ()
    areas: tuple[Line, ...] = ()
    labels: tuple[Label, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    reference: Label | None = None
    metrics: tuple[str, ...] = ()
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def line_chart(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    y_label: str,
    x_label: str = "optimizer step",
    y_range: tuple[float | None, float | None] = (None, None),
    is_log: bool = False,
    reference: tuple[float, str] | None = None,
    smooth: bool = True,
) -> Chart | None:
    """Lines over steps, or None if no series has a finite value.

    From 20 points on, and if ``smooth`` is set, a thin line shows the data and a thick one its mean
    over neighbouring steps. ``y_range`` fixes either end of the axis. A logarithmic axis shows
    values of 0 at its foot.
    """
    drawn = [s for s in series if any(math.isfinite(y) for y in s.y_T)]
    if not drawn:
        return None
    x_values = [x for s in drawn for x in s.x_T]
    y_values = [y for s in drawn for y in s.y_T if math.isfinite(y)]
    if reference is not None:
        y_values.append(reference[0])
    right = WIDTH - (_NAMES_ROOM if len(drawn) > 1 or reference else _BARE_ROOM)
    x_axis = Axis(min(x_values), max(x_values), LEFT, right)
    y_axis = round_axis(y_values, y_range, is_log, HEIGHT - BOTTOM, TOP)
    lines: list[Line] = []
    ends: list[Label] = []
    for one in drawn:
        mean_T = smoothed(one.y_T) if smooth else one.y_T
        if smooth and _window(len(one.y_T)) > 1:
            lines += _lines(one, one.y_T, x_axis, y_axis, "thin")
        lines += _lines(one, mean_T, x_axis, y_axis, "thick")
        last = next(y for y in reversed(mean_T) if math.isfinite(y))
        ends.append(Label(right + 7, y_axis.place(last), one.name, one.style))
    return replace(
        _frame(title, note, drawn, x_axis, y_axis, x_label, y_label),
        lines=tuple(lines),
        labels=_spread(ends) if len(drawn) > 1 else (),
        reference=None
        if reference is None
        else Label(right, y_axis.place(reference[0]), reference[1], "reference"),
    )


def stacked_chart(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    y_label: str,
    x_label: str = "optimizer step",
) -> Chart | None:
    """Areas stacked from the first series up; a NaN counts as 0."""
    drawn = [s for s in series if any(math.isfinite(y) for y in s.y_T)]
    if not drawn:
        return None
    x_T = drawn[0].x_T
    assert all(s.x_T == x_T for s in drawn), "stacked series must share their steps"
    floor_T = [0.0] * len(x_T)
    corners: list[list[tuple[float, float]]] = []
    for one in drawn:
        added_T = [y if math.isfinite(y) else 0.0 for y in one.y_T]
        top_T = [floor + added for floor, added in zip(floor_T, added_T, strict=True)]
        back = zip(reversed(x_T), reversed(floor_T), strict=True)
        corners.append([*zip(x_T, top_T, strict=True), *back])
        floor_T = top_T
    x_axis = Axis(min(x_T), max(x_T), LEFT, WIDTH - _BARE_ROOM)
    y_axis = round_axis(floor_T, (0.0, None), False, HEIGHT - BOTTOM, TOP)
    return replace(
        _frame(title, note, drawn, x_axis, y_axis, x_label, y_label),
        areas=tuple(
            Line(one.style, "", _points(around, x_axis, y_axis))
            for one, around in zip(drawn, corners, strict=True)
        ),
        legend=tuple((one.style, one.name) for one in drawn),
    )


def _frame(
    title: str, note: str, drawn: Sequence[Series], x_axis: Axis, y_axis: Axis, x: str, y: str
) -> Chart:
    """A chart with its axes, labelled ``x`` and ``y``, and its texts, but nothing drawn in it."""
    return Chart(
        title=title,
        y_label=y,
        x_label=x,
        note=note,
        summary=_summary(title, drawn),
        x_ticks=x_axis.ticks(6, is_whole=True),
        y_ticks=y_axis.ticks(5),
        hover_json=_hover_json(drawn, x_axis, x),
        right=round(x_axis.end),
    )


def smoothed(y_T: Sequence[float]) -> tuple[float, ...]:
    """A curve as its thick line shows it."""
    return centred_mean(y_T, _window(len(y_T)))


def centred_mean(y_T: Sequence[float], window: int) -> tuple[float, ...]:
    """Mean of the finite values within ``window`` // 2 of each point; a NaN stays a NaN.

    >>> centred_mean([1.0, 3.0, 5.0], 3)
    (2.0, 3.0, 4.0)
    """
    if not y_T:
        return ()
    half = window // 2
    is_finite = np.isfinite(y_T)
    values = np.pad(np.where(is_finite, y_T, 0.0), half)
    counts = np.pad(is_finite.astype(float), half)
    sums, nums = (sliding_window_view(each, 2 * half + 1).sum(axis=1) for each in (values, counts))
    return tuple(np.where(is_finite, sums / np.maximum(nums, 1.0), math.nan).tolist())


def _window(num_points: int) -> int:
    """How many points a smoothed line averages over."""
    return 1 if num_points < 20 else max(5, num_points // 20)


def _lines(
    one: Series, y_T: Sequence[float], x_axis: Axis, y_axis: Axis, weight: str
) -> list[Line]:
    """One line for each stretch without gaps."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(one.x_T, y_T, strict=True):
        if math.isfinite(y):
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    return [Line(one.style, weight, _points(s, x_axis, y_axis)) for s in stretches if s]


def _points(corners: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in corners]
    shown = places if len(places) <= _MOST_POINTS else _seen(places)
    return " ".join(f"{x:g},{y:g}" for x, y in shown)


def _seen(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The first, lowest, highest and last point of each pixel: a line through them looks alike."""
    kept: list[tuple[float, float]] = []
    for _, those in groupby(places, key=lambda place: int(place[0])):
        of_pixel = list(those)
        by_height = sorted(range(len(of_pixel)), key=lambda i: of_pixel[i][1])
        kept += [of_pixel[i] for i in sorted({0, by_height[0], by_height[-1], len(of_pixel) - 1})]
    return kept


def _spread(labels: Sequence[Label]) -> tuple[Label, ...]:
    """Move labels down until none overlap, then up where they leave the chart."""
    ordered = sorted(labels, key=lambda label: label.y)
    places: list[float] = []
    for label in ordered:
        places.append(max(label.y, places[-1] + _LABEL_GAP) if places else label.y)
    limit = float(HEIGHT - BOTTOM)
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - _LABEL_GAP
    return tuple(
        Label(label.x, round(y, 1), label.text, label.style)
        for label, y in zip(ordered, places, strict=True)
    )


def _summary(title: str, series: Sequence[Series]) -> str:
    parts: list[str] = []
    for one in series:
        finite = [y for y in one.y_T if math.isfinite(y)]
        parts.append(f"{one.name} from {number_text(finite[0])} to {number_text(finite[-1])}")
    return f"{title}: {', '.join(parts)}"


def _hover_json(series: Sequence[Series], x_axis: Axis, x_label: str) -> str:
    """[[pixel, [text, ...]], ...], left to right: an entry a step, of very many one a pixel."""
    all_x = sorted({x for one in series for x in one.x_T})
    if len(all_x) > _MOST_POINTS:
        all_x = {int(x_axis.place(x)): x for x in all_x}.values()
    texts: dict[float, list[str]] = {x: [] for x in all_x}
    for one in series:
        for x, y in zip(one.x_T, one.y_T, strict=True):
            if x in texts:
                texts[x].append(f"{one.name}: {number_text(y)}")
    steps = [[x_axis.place(x), [f"{x_label} {x:g}", *texts[x]]] for x in texts]
    return json.dumps(steps, separators=(",", ":"), ensure_ascii=False)

"""Numbers land on the right pixels, gaps stay gaps, labels stay apart."""

import itertools
import json
import math
from random import Random

import pytest

from forage.evaluation.intervals import Interval
from forage.viewer.axes import number_text
from forage.viewer.charts import (
    WIDTH,
    Chart,
    Series,
    centred_mean,
    line_chart,
    stacked_chart,
)
from forage.viewer.whiskers import IntervalRow, interval_chart

NAN = math.nan


def series(*y: float, name: str = "a", style: str = "s1") -> Series:
    return Series(name, style, tuple(float(x) for x in range(len(y))), y)


def drawn(*several: Series, **settings) -> Chart:
    chart = line_chart("T", "note", several, y_label="y", **settings)
    assert chart is not None
    return chart


def corners(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


def test_the_ends_of_the_data_are_the_ends_of_the_plot() -> None:
    chart = drawn(series(0.0, 0.5, 1.0), y_range=(0.0, 1.0))
    assert corners(chart.lines[0].points) == [
        (chart.left, chart.bottom),
        ((chart.left + chart.right) / 2, (chart.top + chart.bottom) / 2),
        (chart.right, chart.top),
    ]


def test_a_nan_breaks_the_line_and_moves_nothing() -> None:
    whole = drawn(series(1.0, 2.0, 3.0, 4.0))
    broken = drawn(series(1.0, 2.0, NAN, 4.0))
    first, second = (corners(line.points) for line in broken.lines)
    everything = corners(whole.lines[0].points)
    assert first == everything[:2]
    assert second == everything[3:]


def test_series_without_a_finite_value_make_no_chart() -> None:
    assert line_chart("T", "", [series(NAN, NAN)], y_label="y") is None
    assert line_chart("T", "", [], y_label="y") is None
    assert stacked_chart("T", "", [], y_label="y", x_label="x") is None


def test_decades_are_evenly_spaced_on_a_logarithmic_axis_and_zero_stands_at_its_foot() -> None:
    chart = drawn(series(1e-7, 1e-6, 1e-5, 0.0), is_log=True, smooth=False)
    y = [y for _, y in corners(chart.lines[0].points)]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)  # tenths of a pixel
    assert y[3] == chart.bottom
    assert y[3] - y[0] == pytest.approx(y[0] - y[1], abs=0.2)
    assert [tick.text for tick in chart.y_ticks] == ["0", "10⁻⁷", "10⁻⁶", "10⁻⁵"]


@pytest.mark.parametrize("values", [(3.0,), (2.0, 2.0, 2.0), (0.0, 0.0), (-1.0, -1.0)])
def test_one_point_or_a_constant_still_fits_the_plot(values: tuple[float, ...]) -> None:
    for is_log in (False, True):
        chart = drawn(series(*values), is_log=is_log)
        for x, y in corners(chart.lines[0].points):
            assert chart.left <= x <= chart.right
            assert chart.top <= y <= chart.bottom


def test_long_data_are_drawn_thin_as_they_are_and_thick_as_their_mean() -> None:
    values = [float(n % 2) for n in range(40)]
    chart = drawn(series(*values))
    thin, thick = chart.lines
    assert (thin.weight, thick.weight) == ("thin", "thick")
    assert len(corners(thin.points)) == len(corners(thick.points)) == 40
    spread = [max(y) - min(y) for y in ([y for _, y in corners(c.points)] for c in (thin, thick))]
    assert spread[1] < spread[0] / 2


def test_a_centred_mean_looks_both_ways_and_over_gaps() -> None:
    assert centred_mean([1.0, 2.0, 6.0], 3) == (1.5, 3.0, 4.0)
    smooth = centred_mean([1.0, NAN, 3.0], 3)
    assert (smooth[0], smooth[2]) == (1.0, 3.0)
    assert math.isnan(smooth[1])


def test_a_line_of_very_many_points_is_thinned_to_what_is_seen() -> None:
    random = Random(0)
    values = [random.random() for _ in range(20_000)]
    values[7_777], values[12_345] = 5.0, -3.0
    chart, small = drawn(series(*values)), drawn(series(5.0, -3.0))
    thin, thick = (corners(line.points) for line in chart.lines)
    assert max(len(thin), len(thick)) <= 4 * WIDTH
    for end in (min, max):
        assert end(y for _, y in thin) == end(y for _, y in corners(small.lines[0].points))
    hover = json.loads(chart.hover_json)
    assert 300 < len(hover) <= WIDTH
    assert hover[-1][1][0] == "optimizer step 19999"


def test_stacked_areas_rest_on_each_other() -> None:
    chart = stacked_chart(
        "T", "", [series(1.0, 2.0), series(3.0, NAN)], y_label="s", x_label="step"
    )
    assert chart is not None
    lower, upper = (corners(area.points) for area in chart.areas)
    assert lower[:2] == [upper[3], upper[2]], "the upper one's floor is the lower one's top"
    assert upper[1] == upper[2], "a missing value adds nothing"
    assert lower[2:] == [(chart.right, chart.bottom), (chart.left, chart.bottom)]


def test_names_at_the_ends_of_lines_never_overlap_and_stay_inside() -> None:
    many = [series(0.0, 1.0 + n / 1000, name=f"line {n}") for n in range(6)]
    many += [series(1.0, 0.0, name="low"), series(1.0, 0.001, name="also low")]
    chart = drawn(*many)
    y = sorted(label.y for label in chart.labels)
    assert len(y) == 8
    assert all(b - a >= 13.9 for a, b in itertools.pairwise(y))
    assert y[-1] <= chart.bottom


def test_the_tooltip_tells_every_series_of_a_step() -> None:
    chart = drawn(series(0.25, 1.0, name="a"), series(NAN, 2.0, name="b"))
    hover = json.loads(chart.hover_json)
    assert hover[0] == [chart.left, ["optimizer step 0", "a: 0.25", "b: –"]]
    assert hover[1] == [chart.right, ["optimizer step 1", "a: 1", "b: 2"]]


def test_whiskers_span_the_interval_and_before_stands_above_after() -> None:
    rows = [
        IntervalRow("All", Interval(0.5, 0.25, 0.75), Interval(1.0, 1.0, 1.0), True),
        IntervalRow("1 hop", None, Interval(0.0, 0.0, 0.5)),
    ]
    chart = interval_chart(rows, "exact match")
    width = chart.right - chart.left
    before, after, alone = chart.whiskers
    assert before.mean - before.low == pytest.approx(width / 4)
    assert (after.low, after.mean, after.high) == (chart.right,) * 3
    assert before.y < after.y < alone.y < chart.bottom
    assert alone.y == chart.rows[1][0].y, "a row with one figure has it in the middle"
    assert "All, before: 0.500 [0.250, 0.750]" in chart.summary


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.0, "1"), (0.98765, "0.988"), (12345.6, "12,346"), (5e-5, "5e-5"), (NAN, "–")],
)
def test_numbers_read_as_a_reader_wants_them(value: float, text: str) -> None:
    assert number_text(value) == text

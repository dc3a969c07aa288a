"""The curve of a group of runs: its mean at each step, and a band over the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from forage.evaluation.seed_groups import over_runs
from forage.viewer.charts import Series, smoothed


def group_series(name: str, members: Mapping[str, Series], smoothing: float) -> Series:
    """The group's curve, for its runs by name: means over the runs with a value at each step.

    The thick line and the band, Student's 95 % interval over runs, are those of the runs' smoothed
    curves. A single run has no band.
    """
    series = list(members.values())
    steps = sorted({x for one in series for x in one.x_T})
    places = {x: place for place, x in enumerate(steps)}
    where = [[places[x] for x in one.x_T] for one in series]
    mean_T, _, num_T = over_runs(_table(where, [one.y_T for one in series], len(steps)))
    curves = [smoothed(one.y_T, smoothing) for one in series]
    drawn_T, half_T, _ = over_runs(_table(where, curves, len(steps)))
    has_band = len(series) > 1
    return Series(
        name,
        "s0",
        tuple(steps),
        tuple(mean_T.tolist()),
        tuple(drawn_T.tolist()),
        members=tuple(members),
        low_T=tuple((drawn_T - half_T).tolist()) if has_band else (),
        high_T=tuple((drawn_T + half_T).tolist()) if has_band else (),
        counts_T=tuple(num_T.tolist()),
    )


def _table(
    where: Sequence[Sequence[int]], curves: Sequence[Sequence[float]], num_steps: int
) -> np.ndarray:
    """Values by run and step, NaN where a run has none."""
    table_ST = np.full((len(curves), num_steps), math.nan)
    for row_T, places, values in zip(table_ST, where, curves, strict=True):
        row_T[places] = values
    return table_ST

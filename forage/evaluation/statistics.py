"""How sure a mean is: bootstrap intervals, plain and paired.

Evaluation hands over one number for each question; the summary and the report show the intervals.
Pure functions of numbers: no episodes, no files, no global randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Resampled indices held at once: 4 M of them are 32 MB, whatever the number of questions.
_MAX_INDICES = 4_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the bounds within which resampling puts it."""

    mean: float
    low: float
    high: float


def bootstrap_interval(
    values: Sequence[float], num_resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Percentile bootstrap of the mean; raises ``ValueError`` for no values or a bad level.

    Draw n values with replacement, take their mean, repeat; the bounds are the (1 - level) / 2 and
    (1 + level) / 2 quantiles of those means. Efron and Tibshirani, An Introduction to the
    Bootstrap (1993), chapter 13. Values that are all equal give an interval of no width: the
    sample shows no spread, which for a rate of exactly 0 or 1 flatters it.

    >>> bootstrap_interval([1.0, 1.0, 1.0])
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError("an interval needs at least one value")
    if not np.isfinite(sample).all():
        raise ValueError("an interval needs finite values; one is NaN or infinite")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1, for example 0.95")
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; at least 1 is needed")
    tail = (1 - level) / 2
    low, high = np.quantile(_resampled_means(sample, num_resamples, seed), [tail, 1 - tail])
    return Interval(float(sample.mean()), float(low), float(high))


def paired_difference(
    before: Sequence[float],
    after: Sequence[float],
    num_resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Interval of mean(after - before) where both hold the same questions in the same order.

    Questions are resampled, each with its two values, so what makes a question hard cancels: the
    interval is narrower than the difference of two separate ones. Raises ``ValueError``.
    """
    if len(before) != len(after):
        raise ValueError(
            f"{len(before)} values before and {len(after)} after: a paired difference needs the "
            "same questions in both"
        )
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return bootstrap_interval(differences, num_resamples, seed, level)


def _resampled_means(sample: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Means of ``num_resamples`` samples of the same size, drawn with replacement."""
    random = np.random.default_rng(seed)
    rows = max(1, _MAX_INDICES // sample.size)
    means = [
        sample[
            random.integers(0, sample.size, (min(rows, num_resamples - start), sample.size))
        ].mean(axis=1)
        for start in range(0, num_resamples, rows)
    ]
    return np.concatenate(means)

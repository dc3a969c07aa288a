"""Bootstrap intervals of means: plain, paired, and averaged over data sources.

One row of numbers for each question goes in; summaries, comparisons and reports show the intervals.
Pure functions of numbers: no episodes, no files, no global randomness. Axes: ``_N`` questions,
``_C`` columns (figures), ``_R`` resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Resampled indices held at once: 2 MB of them stay in the cache, which halves the time.
_MAX_INDICES = 250_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the bounds of its interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference with its interval, and its p-value against no difference."""

    interval: Interval
    p_value: float


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The means of columns, and their means over samples drawn with replacement."""

    means_C: np.ndarray
    resampled_RC: np.ndarray

    def interval(self, column: int = 0, level: float = 0.95) -> Interval:
        """Percentile interval of a column's mean; raises ``ValueError`` for a bad level.

        The bounds are the (1 - level) / 2 and (1 + level) / 2 quantiles of the resampled means.
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Values that are
        all equal give an interval of no width: the sample shows no spread, which for a rate of
        exactly 0 or 1 flatters it.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; it must lie between 0 and 1, for example 0.95")
        tail = (1 - level) / 2
        low, high = np.quantile(self.resampled_RC[:, column], [tail, 1 - tail])
        return Interval(float(self.means_C[column]), float(low), float(high))

    def p_value(self, column: int = 0) -> float:
        """Two-sided p-value of a column's mean being 0: (1 + b) / (1 + R).

        b counts the resampled means that lie at least as far from the sample's mean as that lies
        from 0: the test by bootstrap of Davison and Hinkley, Bootstrap Methods and their
        Application (1997), section 4.4. It is never 0, and never below 1 / (1 + R).
        """
        mean = self.means_C[column]
        away_R = np.abs(self.resampled_RC[:, column] - mean)
        # A rounding error must not make the draw that equals the sample's mean less extreme.
        num_as_far = int(np.count_nonzero(away_R >= abs(mean) * (1 - 1e-9)))
        return (1 + num_as_far) / (1 + len(away_R))


def bootstrap(
    rows: Sequence[Sequence[float]] | np.ndarray, num_resamples: int = 1000, seed: int = 0
) -> Bootstrap:
    """Resample whole rows; raises ``ValueError`` if there are none, or one is not finite."""
    sample_NC = np.asarray(rows, dtype=np.float64)
    if sample_NC.size == 0:
        raise ValueError("an interval needs at least one value")
    assert sample_NC.ndim == 2, "rows of figures, one a question"
    if not np.isfinite(sample_NC).all():
        raise ValueError("an interval needs finite values; one is NaN or infinite")
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; at least 1 is needed")
    return Bootstrap(sample_NC.mean(axis=0), _resampled_means(sample_NC, num_resamples, seed))


def macro_bootstrap(parts: Sequence[Bootstrap]) -> Bootstrap:
    """The plain mean over parts (data sources) that were resampled separately.

    The resamples of the parts must be independent: give each part its own seed.
    """
    return Bootstrap(
        np.mean([part.means_C for part in parts], axis=0),
        np.mean([part.resampled_RC for part in parts], axis=0),
    )


def bootstrap_interval(
    values: Sequence[float], num_resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Percentile bootstrap of the mean of one column; raises ``ValueError``.

    >>> bootstrap_interval([1.0, 1.0, 1.0])
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    column = [[value] for value in values]
    return bootstrap(column, num_resamples, seed).interval(0, level)


def paired_difference(
    before: Sequence[float],
    after: Sequence[float],
    num_resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Difference:
    """mean(after - before) where both hold the same questions in the same order.

    Questions are resampled, each with its two values, so what makes a question hard cancels: the
    interval is narrower than the difference of two separate ones. Raises ``ValueError``.
    """
    if len(before) != len(after):
        raise ValueError(
            f"{len(before)} values before and {len(after)} after: a paired difference needs the "
            "same questions in both"
        )
    differences = [[b - a] for a, b in zip(before, after, strict=True)]
    resampled = bootstrap(differences, num_resamples, seed)
    return Difference(resampled.interval(0, level), resampled.p_value())


def _resampled_means(sample_NC: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Means of ``num_resamples`` samples of N rows, drawn with replacement: [R, C].

    How often each row was drawn, times the rows, is the sum over the draws: one draw serves all
    columns.
    """
    random = np.random.default_rng(seed)
    size = len(sample_NC)
    at_once = max(1, _MAX_INDICES // size)
    means: list[np.ndarray] = []
    for start in range(0, num_resamples, at_once):
        num_draws = min(at_once, num_resamples - start)
        drawn = random.integers(0, size, (num_draws, size))
        drawn += size * np.arange(num_draws)[:, None]
        counts_RN = np.bincount(drawn.ravel(), minlength=num_draws * size).reshape(num_draws, size)
        means.append(counts_RN @ sample_NC / size)
    return np.concatenate(means)

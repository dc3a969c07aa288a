"""One axis of a chart: where a value stands, in pixels, and the ticks beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    position: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``.

    A logarithmic axis with ``has_zero`` shows values of 0 at its foot, a decade below the rest.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    has_zero: bool = False

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)

    def ticks(self, count: int, is_whole: bool = False) -> tuple[Tick, ...]:
        if self.is_log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            step = max(1, math.ceil((last - first) / count))
            foot = (Tick(self.start, "0"),) if self.has_zero else ()
            return foot + tuple(
                Tick(self.place(10.0**n), _power_text(n))
                for n in range(first + len(foot), last + 1, step)
            )
        step = _nice_step((self.high - self.low) / count)
        if is_whole:
            step = max(1.0, step)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return tuple(
            Tick(self.place(n * step), number_text(n * step)) for n in range(first, last + 1)
        )


def round_axis(
    values: Sequence[float],
    fixed: tuple[float | None, float | None],
    is_log: bool,
    start: float,
    end: float,
) -> Axis:
    """An axis over ``values`` with round ends; ``fixed`` gives an end that must not move."""
    if is_log:
        positive = [v for v in values if v > 0] or [1e-8]
        low = 10.0 ** math.floor(math.log10(min(positive)))
        high = 10.0 ** math.ceil(math.log10(max(positive)))
        high = high if high > low else low * 10
        has_zero = any(v <= 0 for v in values)
        return Axis(low / 10 if has_zero else low, high, start, end, True, has_zero)
    low = min(values) if fixed[0] is None else fixed[0]
    high = max(values) if fixed[1] is None else fixed[1]
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _nice_step((high - low) / 5)
    if fixed[0] is None:
        low = math.floor(low / step + 1e-9) * step
    if fixed[1] is None:
        high = math.ceil(high / step - 1e-9) * step
    return Axis(low, high, start, end)


def number_text(value: float) -> str:
    """A number for readers: three digits, and an exponent only where it is needed.

    >>> number_text(0.12345), number_text(1234.5), number_text(0.0000012), number_text(2.0)
    ('0.123', '1,234', '1.2e-6', '2')
    """
    if not math.isfinite(value):
        return "–"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2g}".replace("e-0", "e-")


def _nice_step(rough: float) -> float:
    """The smallest of 1, 2, 5, 10 times a power of ten that is at least ``rough``."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next((power * m for m in (1.0, 2.0, 5.0) if power * m >= rough * 0.999), power * 10)


def _power_text(exponent: int) -> str:
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return "1" if exponent == 0 else "10" + str(exponent).translate(digits)

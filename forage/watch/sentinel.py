"""Detects the signs of a collapse, from one step's metrics to the next.

The loop shows it each step's metrics and acts on its alarms (warn, stop, or roll back); this file
does neither. Its state is a function of the metrics shown, so a resumed run replays the recorded
ones. docs/sentinel.md explains each sign and its threshold.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from forage.config.sentinel_config import SentinelConfig

_HOPS = re.compile(r"searches/hops_(\d+)")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign that stayed beyond its limit: which one, since when, and what it means."""

    step: int
    since: int
    signal: str
    value: float
    normal: float
    limit: float
    meaning: str

    def __str__(self) -> str:
        return (
            f"{self.signal} is {self.value:.4g} at step {self.step}, beyond {self.limit:.4g} since "
            f"step {self.since} (normal: {self.normal:.4g}): {self.meaning}"
        )


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing to watch.

    ``normal`` is the median of the last values within limits ("recent"), or the best median so far
    ("best", against slow decay); "zero" is normal from the first step on. ``limit`` computes from
    it the bound that a value may not pass, downwards ("below") or upwards ("above").
    """

    signal: str
    side: Literal["below", "above"]
    against: Literal["recent", "best", "zero"]
    limit: Callable[[float], float]
    meaning: str

    def is_beyond(self, value: float, limit: float) -> bool:
        return value < limit if self.side == "below" else value > limit


@dataclass(frozen=True, slots=True)
class SignState:
    """A sign's last value, its normal value and its limit.

    ``normal`` and ``limit`` are None until a whole window has been seen; ``num_beyond`` counts the
    consecutive steps beyond the limit.
    """

    sign: Sign
    value: float
    normal: float | None
    limit: float | None
    num_beyond: int


@dataclass(slots=True)
class _Watch:
    sign: Sign
    recent: deque[float]
    best: float | None = None
    since: int | None = None
    num_beyond: int = 0
    last: float = math.nan

    def see(self, step: int, value: float, patience: int) -> Alarm | None:
        """Judges and stores a value; returns an alarm in the step in which patience runs out."""
        self.last = value
        normal = self._normal()
        if normal is None or not self.sign.is_beyond(value, self.sign.limit(normal)):
            self._remember(value)
            return None
        self.since = step if self.since is None else self.since
        self.num_beyond += 1
        if self.num_beyond != patience:
            return None
        sign = self.sign
        return Alarm(step, self.since, sign.signal, value, normal, sign.limit(normal), sign.meaning)

    def state(self) -> SignState:
        normal = self._normal()
        limit = None if normal is None else self.sign.limit(normal)
        return SignState(self.sign, self.last, normal, limit, self.num_beyond)

    def _normal(self) -> float | None:
        """The normal value; None until a whole window has been seen, if it depends on values."""
        if self.sign.against == "zero":
            return 0.0
        if self.best is None:
            return None
        return self.best if self.sign.against == "best" else median(self.recent)

    def _remember(self, value: float) -> None:
        self.since, self.num_beyond = None, 0
        self.recent.append(value)
        if len(self.recent) == self.recent.maxlen:
            middle = median(self.recent)
            better = max if self.sign.side == "below" else min
            self.best = middle if self.best is None else better(self.best, middle)


@dataclass(slots=True)
class Sentinel:
    """Watches the metrics of one step after another; ``max_grad_norm`` is the trainer's."""

    config: SentinelConfig
    max_grad_norm: float
    _watches: dict[str, _Watch] = field(default_factory=dict)

    def see(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms that begin with this step; signs without a finite value are skipped."""
        alarms: list[Alarm] = []
        for key, sign in self._signs(metrics).items():
            value = metrics.get(sign.signal, math.nan)
            if not math.isfinite(value):
                continue
            watch = self._watches.get(key)
            if watch is None:
                watch = self._watches[key] = _Watch(sign, deque(maxlen=self.config.window))
            alarm = watch.see(step, value, self.config.patience)
            if alarm is not None:
                alarms.append(alarm)
        return alarms

    def metrics(self) -> dict[str, float]:
        """How many signs are beyond their limits, and how many of them for longer than patience."""
        beyond = [watch.num_beyond for watch in self._watches.values() if watch.num_beyond]
        return {
            "sentinel/beyond": float(len(beyond)),
            "sentinel/alarms": float(sum(n >= self.config.patience for n in beyond)),
        }

    def states(self) -> list[SignState]:
        """The state of each sign seen so far."""
        return [watch.state() for watch in self._watches.values()]

    def _signs(self, metrics: Mapping[str, float]) -> dict[str, Sign]:
        signs = _fixed_signs(self.config, self.max_grad_norm)
        matches = [match for name in metrics if (match := _HOPS.fullmatch(name))]
        hops = {match.group(): int(match.group(1)) for match in matches}
        for name, num_hops in (hops or {"searches/mean": None}).items():
            signs[name] = _searches_sign(name, num_hops, self.config.searches_drop)
        return signs


def _fixed_signs(config: SentinelConfig, max_grad_norm: float) -> dict[str, Sign]:
    signs = {} if config.max_logprob_diff is None else _sampler_sign(config.max_logprob_diff)
    return signs | {
        "likelihood": Sign(
            "health/correct_logprob",
            "below",
            "best",
            # A confident policy is sure of every token, so a multiple alone would be noise.
            lambda normal: min(normal * config.surprise_growth, normal - config.likelihood_drop),
            "the policy finds its own correct episodes less and less likely",
        ),
        "low entropy": Sign(
            "policy/entropy",
            "below",
            "recent",
            lambda _: config.min_entropy,
            "the policy no longer explores",
        ),
        "high entropy": Sign(
            "policy/entropy",
            "above",
            "best",
            lambda normal: max(normal * config.entropy_growth, normal + config.entropy_rise),
            "the policy turns to noise",
        ),
        "gradient": Sign(
            "optimizer/grad_norm",
            "above",
            "recent",
            lambda normal: max(normal * config.grad_norm_growth, max_grad_norm),
            "single steps change the policy too much",
        ),
        "reward": Sign(
            "health/misranked",
            "above",
            "recent",
            lambda _: config.max_misranked,
            "the reward does not separate right from wrong answers, so it can be gamed",
        ),
        "format": _rising_sign(
            "health/format_breaks",
            config.format_breaks_rise,
            "the reasoning falls apart: think blocks are left open or contain other tags",
        ),
        "repetition": _rising_sign(
            "health/repetition", config.repetition_rise, "the policy repeats itself within a turn"
        ),
        "repeated searches": _rising_sign(
            "health/repeated_searches",
            config.repeated_searches_rise,
            "the policy repeats its searches",
        ),
        "empty answers": _rising_sign(
            "health/empty_answers", config.empty_answers_rise, "the policy gives empty answers"
        ),
    }


def _sampler_sign(limit: float) -> dict[str, Sign]:
    return {
        "sampler": Sign(
            "policy/logprob_diff_mean",
            "above",
            "zero",
            lambda _: limit,
            "the sampler computes different log-probabilities from the trainer: its weights or "
            "its computation differ",
        )
    }


def _rising_sign(metric: str, rise: float, meaning: str) -> Sign:
    """A metric that is ``rise`` above its best median so far."""
    return Sign(metric, "above", "best", lambda normal: normal + rise, meaning)


def _searches_sign(name: str, num_hops: int | None, drop: float) -> Sign:
    """A question needs as many searches as it has hops, or one if its hops are unknown."""
    which = "" if num_hops is None else f" on questions of {num_hops} hops"
    return Sign(
        name,
        "below",
        "best",
        lambda normal: min(normal, float(num_hops or 1)) * (1.0 - drop),
        f"the policy stops searching{which}",
    )

"""Which metrics make which chart, and the words under each: shared by report and viewer.

Rows of ``metrics.jsonl`` come in; charts go out, those without any data left out. A note says what
a chart shows, and then what these very curves did: a claim about them is made from their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forage.evaluation.report.labels import hops_text
from forage.viewer.axes import number_text
from forage.viewer.charts import Chart, Series, line_chart, smoothed, stacked_chart

MetricRow = Mapping[str, float]
Told = Callable[[Sequence[Series]], str]
"""What the curves of a chart did, in a sentence."""

HEADLINE_METRICS = (
    *("reward/mean", "em/mean", "searches/mean", "tokens/sampled_mean", "policy/entropy"),
    *("optimizer/grad_norm", "policy/logprob_diff_max", "groups/flat"),
)
"""What is looked at first, of one run and of several over each other."""

_LEVEL = 1e-6
"""A metric that varies by less, in its own size where that is above 1, is level."""
_LEVEL_SHARE = 0.02
"""... and where its axis has both ends, what varies by less of it is seen as a level line."""
_LAST_COLOUR = 4
"""Lines beyond have the last colour, too; their names stand at their ends."""
_FLOAT32 = 1e-5
_ENOUGH = 0.15
"""Searches by which a question may miss its hops on average and count as searched enough."""


def ends(one: Series) -> tuple[float, float]:
    finite = [y for y in one.y_T if math.isfinite(y)]
    return finite[0], finite[-1]


def from_to(series: Sequence[Series]) -> str:
    """Where each curve began and ended: "From 0.34 to 0.11"."""
    shown = [one for one in series if _has_values(one)]
    parts = [" to ".join(map(number_text, ends(one))) for one in shown]
    if len(parts) == 1:
        return f"From {parts[0]}."
    return "; ".join(f"{one.name}: {part}" for one, part in zip(shown, parts, strict=True)) + "."


def searches_told(series: Sequence[Series]) -> str:
    """Whether questions of N hops are searched N times at the end, each kind by its own figure.

    Curves that end at 0.95, 1.5 and 2.9: enough on 1 and 3 hops, too few on 2.
    """
    kinds: dict[str, list[str]] = {}
    for one in series:
        hops = one.name.partition(" ")[0]
        if not _has_values(one) or not hops.isdigit():
            continue
        last = ends(one)[1]
        miss = last - int(hops)
        kind = "as many as needed" if abs(miss) <= _ENOUGH else "fewer" if miss < 0 else "more"
        kinds.setdefault(kind, []).append(f"{last:.2f} for {one.name}")
    if not kinds:
        return from_to(series)
    told = "; ".join(f"{kind}: {', '.join(parts)}" for kind, parts in kinds.items())
    return f"At the end, searches against hops: {told}."


def float32_told(series: Sequence[Series]) -> str:
    """Whether the differences stay below the line of float32."""
    largest = max(y for one in series for y in one.y_T if math.isfinite(y))
    side = "below" if largest <= _FLOAT32 else "above"
    return f"The largest is {number_text(largest)}, {side} the dotted line that float32 keeps to."


def _has_values(one: Series) -> bool:
    return any(math.isfinite(y) for y in one.y_T)


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart over steps: ``lines`` names the line of each metric; the rest is the chart's."""

    title: str
    note: str
    lines: Mapping[str, str]
    y_label: str
    y_range: tuple[float | None, float | None] = (0.0, None)
    is_log: bool = False
    reference: tuple[float, str] | None = None
    smooth: bool = True
    is_stacked: bool = False
    told: Told = from_to

    def level(self, rows: Sequence[MetricRow]) -> str:
        """What all its curves are throughout, "" where one of them moves or there is none."""
        told: dict[str, list[str]] = {}
        low, high = self.y_range
        seen = 0.0 if low is None or high is None else _LEVEL_SHARE * (high - low)
        for one in self._series(rows):
            finite = [0.0 if abs(y) <= _LEVEL else y for y in one.y_T if math.isfinite(y)]
            if not finite:
                continue
            least, most = min(finite), max(finite)
            if most - least > max(seen, _LEVEL * max(1.0, abs(finite[0]))):
                return ""
            texts = dict.fromkeys((number_text(least), number_text(most)))
            told.setdefault(" to ".join(texts), []).append(one.name)
        if len(told) < 2:
            return f"{self.title} {''.join(told)}" if told else ""
        return f"{self.title}: " + ", ".join(f"{' and '.join(n)} {v}" for v, n in told.items())

    def draw(self, rows: Sequence[MetricRow]) -> Chart | None:
        """The chart of a run's rows; None where no row holds any of the metrics."""
        series = self._series(rows)
        if not any(map(_has_values, series)):
            return None
        # Words are about the line that is seen: the thick one, where it is a mean.
        lines = [replace(s, y_T=smoothed(s.y_T)) for s in series] if self.smooth else series
        note = f"{self.note} {self.told(lines)}" if len(rows) > 1 else self.note
        metrics = tuple(key for key in self.lines if any(key in row for row in rows))
        if self.is_stacked:
            chart = stacked_chart(self.title, note, series, y_label=self.y_label)
        else:
            chart = line_chart(
                self.title,
                note,
                series,
                y_label=self.y_label,
                y_range=self.y_range,
                is_log=self.is_log,
                reference=self.reference,
                smooth=self.smooth,
            )
        return chart and replace(chart, metrics=metrics)

    def _series(self, rows: Sequence[MetricRow]) -> list[Series]:
        # A line alone has the colour s0, several have s1, s2, ...; areas have p1, p2, ...
        first = 1 if len(self.lines) > 1 else 0
        kind = "p" if self.is_stacked else "s"
        steps = tuple(row["step"] for row in rows)
        series: list[Series] = []
        for number, (key, name) in enumerate(self.lines.items(), start=first):
            if any(key in row for row in rows):
                style = f"{kind}{min(number, _LAST_COLOUR)}"
                values = tuple(row.get(key, math.nan) for row in rows)
                series.append(Series(name, style, steps, values))
        return series


REWARD = Panel(
    "Reward",
    "Mean reward of the sampled episodes. A step plays other questions than the one before, so "
    "single steps scatter.",
    {"reward/mean": "reward"},
    "mean reward",
    y_range=(None, None),
)
EXACT_MATCH = Panel(
    "Exact match by hops",
    "Share of sampled episodes whose answer equals a golden answer, by the number of passages that "
    "a question needs.",
    {"em/mean": "mean"},
    "exact match",
    y_range=(0.0, 1.0),
)
SEARCHES = Panel(
    "Searches per question",
    "A policy that has learnt when to stop searches once for each hop.",
    {"searches/mean": "mean"},
    "searches",
    told=searches_told,
)
RESPONSE_LENGTH = Panel(
    "Response length",
    "Tokens that the policy sampled in an episode; the prompt and what searches returned are not "
    "counted.",
    {"tokens/sampled_mean": "tokens"},
    "tokens per episode",
)
ENTROPY = Panel(
    "Entropy",
    "Mean entropy of the distribution that tokens were sampled from: low where the policy has made "
    "up its mind; at zero it would explore no more.",
    {"policy/entropy": "entropy"},
    "nats per token",
)

HEALTH = (
    Panel(
        "Sampler against trainer",
        "Largest difference between a token's log-probability when sampled and when trained, over "
        "all tokens of a step. Logarithmic axis.",
        {"policy/logprob_diff_max": "difference"},
        "nats",
        y_range=(None, None),
        is_log=True,
        reference=(_FLOAT32, "float32"),
        smooth=False,
        told=float32_told,
    ),
    Panel(
        "KL divergence",
        "How far a step's policy has moved from the one that sampled its tokens.",
        {"policy/kl": "KL"},
        "nats per token",
        y_range=(None, None),
    ),
    Panel(
        "Gradient norm",
        "Length of the gradient. A sudden rise that stays is the first sign of a collapse.",
        {"optimizer/grad_norm": "norm"},
        "before clipping",
    ),
    Panel(
        "Learning rate",
        "Step size of the optimizer.",
        {"optimizer/learning_rate": "rate"},
        "per step",
        smooth=False,
    ),
    Panel(
        "Clipped tokens",
        "Share of tokens whose probability ratio left the clip range, and so gave no gradient.",
        {"loss/clip_fraction": "clipped"},
        "share of tokens",
    ),
    Panel(
        "Answered",
        "Episodes that end in an answer. The others ran out of turns or tokens, or met a failure.",
        {"episodes/answered": "answered"},
        "share of episodes",
        y_range=(0.0, 1.0),
    ),
    Panel(
        "Where the time goes",
        "Seconds of each step by phase, without evaluations, on top of each other. The wait for "
        "searches is part of the rollout: other episodes continue during it.",
        {
            "seconds/rollout": "rollout",
            "seconds/train": "train",
            "seconds/publish": "publish",
            "seconds/record": "record",
        },
        "seconds per step",
        is_stacked=True,
    ),
    Panel(
        "Rollout speed",
        "A step's sampled tokens per second of its rollout phase, searches included; with "
        "staleness that phase is only the time the trainer waited.",
        {"rollout/tokens_per_s": "tokens"},
        "tokens per second",
    ),
    Panel(
        "Failures and exclusions",
        "Searches that failed, episodes kept out of the loss, and transcripts that did not match "
        "what the engine saw (always 0 in a sound run).",
        {
            "search/failures": "searches",
            "episodes/excluded": "excluded",
            "transcript/violations": "violations",
        },
        "count per step",
        smooth=False,
    ),
)


def learning_charts(rows: Sequence[MetricRow]) -> list[Chart]:
    """What the policy learnt: reward, exact match, searches, length, entropy."""
    rewards = [row.get("reward/mean", math.nan) for row in rows]
    fits_unit = all(0 <= reward <= 1 for reward in rewards if math.isfinite(reward))
    panels = (
        replace(REWARD, y_range=(0.0, 1.0)) if fits_unit else REWARD,
        _by_hops(EXACT_MATCH, "em", rows),
        _by_hops(SEARCHES, "searches", rows),
        RESPONSE_LENGTH,
        ENTROPY,
    )
    return _drawn(panels, rows)


def health_charts(rows: Sequence[MetricRow]) -> tuple[list[Chart], str]:
    """Whether the run was sound: charts of what moved, and one line on all that stayed level."""
    is_long = len(rows) > 1
    level = {panel.title: panel.level(rows) if is_long else "" for panel in HEALTH}
    moved = [panel for panel in HEALTH if not level[panel.title]]
    told = "; ".join(text for text in level.values() if text)
    return _drawn(moved, rows), f"Level throughout: {told}." if told else ""


def _drawn(panels: Sequence[Panel], rows: Sequence[MetricRow]) -> list[Chart]:
    charts = (panel.draw(rows) for panel in panels)
    return [chart for chart in charts if chart is not None]


def _by_hops(panel: Panel, metric: str, rows: Sequence[MetricRow]) -> Panel:
    """The panel by hops; of the mean alone where questions do not say how many they need."""
    names = {name.removeprefix(f"{metric}/hops_") for row in rows for name in row}
    hops = sorted(int(name) for name in names if name.isdecimal())
    lines = {f"{metric}/hops_{n}": hops_text(n) for n in hops}
    return replace(panel, lines=lines or panel.lines)

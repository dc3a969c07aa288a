"""Which metrics make which chart, and the line that explains each: shared by report and viewer.

Rows of ``metrics.jsonl`` come in; charts go out, those without any data left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forage.viewer.charts import Chart, Series, line_chart, stacked_chart

MetricRow = Mapping[str, float]


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

    def draw(self, rows: Sequence[MetricRow]) -> Chart | None:
        """The chart of a run's rows; None where no row holds any of the metrics."""
        # A line alone has the colour s0, several have s1, s2, ...; areas have p1, p2, ...
        first = 1 if len(self.lines) > 1 else 0
        kind = "p" if self.is_stacked else "s"
        steps = tuple(row["step"] for row in rows)
        series = [
            Series(name, f"{kind}{number}", steps, tuple(row.get(key, math.nan) for row in rows))
            for number, (key, name) in enumerate(self.lines.items(), start=first)
            if any(key in row for row in rows)
        ]
        if self.is_stacked:
            return stacked_chart(self.title, self.note, series, y_label=self.y_label)
        return line_chart(
            self.title,
            self.note,
            series,
            y_label=self.y_label,
            y_range=self.y_range,
            is_log=self.is_log,
            reference=self.reference,
            smooth=self.smooth,
        )


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
    {"em/hops_1": "1 hop", "em/hops_2": "2 hops", "em/hops_3": "3 hops"},
    "exact match",
    y_range=(0.0, 1.0),
)
SEARCHES = Panel(
    "Searches per question",
    "A policy that has learnt when to stop searches once for each hop: the lines settle at 1, 2 "
    "and 3.",
    {"searches/hops_1": "1 hop", "searches/hops_2": "2 hops", "searches/hops_3": "3 hops"},
    "searches",
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
    "Mean entropy of the distribution that tokens were sampled from. It falls as the policy makes "
    "up its mind; at zero it would explore no more.",
    {"policy/entropy": "entropy"},
    "nats per token",
)

HEALTH = (
    Panel(
        "Sampler against trainer",
        "Largest difference between a token's log-probability when sampled and when trained, over "
        "all tokens of a step. With weights in float32 it stays below the dotted line. Logarithmic "
        "axis.",
        {"policy/logprob_diff_max": "difference"},
        "nats",
        y_range=(None, None),
        is_log=True,
        reference=(1e-5, "float32"),
        smooth=False,
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
        "Step size of the optimizer, with its warm-up.",
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
        "Seconds of each step by phase, on top of each other. The wait for searches is part of the "
        "rollout: other episodes go on meanwhile.",
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
        "Tokens sampled in a second of rollout, searches included.",
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
    reward = replace(REWARD, y_range=(0.0, 1.0)) if _fits_unit(rows, "reward/mean") else REWARD
    panels = (
        reward,
        _hops_or_mean(EXACT_MATCH, "em/mean", rows),
        _hops_or_mean(SEARCHES, "searches/mean", rows),
        RESPONSE_LENGTH,
        ENTROPY,
    )
    return _drawn(panels, rows)


def health_charts(rows: Sequence[MetricRow]) -> list[Chart]:
    """Whether the run was sound: numerics, optimizer, time."""
    return _drawn(HEALTH, rows)


def warm_start_chart(points: Sequence[tuple[int, float]]) -> Chart | None:
    """Loss of the supervised warm start over its steps."""
    steps, losses = tuple(float(s) for s, _ in points), tuple(loss for _, loss in points)
    return line_chart(
        "Warm start",
        "Supervised loss on demonstrations that are deliberately poor: they teach the protocol "
        "and how to read a passage, not what to search or when to stop.",
        (Series("loss", "s0", steps, losses),) if points else (),
        y_label="loss, nats per token",
        x_label="supervised step",
        y_range=(0.0, None),
    )


def _drawn(panels: Sequence[Panel], rows: Sequence[MetricRow]) -> list[Chart]:
    charts = (panel.draw(rows) for panel in panels)
    return [chart for chart in charts if chart is not None]


def _hops_or_mean(panel: Panel, mean: str, rows: Sequence[MetricRow]) -> Panel:
    """The panel by hops, or of the mean alone where questions do not say how many they need."""
    if any(key in row for row in rows for key in panel.lines):
        return panel
    return replace(panel, lines={mean: "mean"})


def _fits_unit(rows: Sequence[MetricRow], name: str) -> bool:
    return all(0 <= row[name] <= 1 for row in rows if math.isfinite(row.get(name, math.nan)))

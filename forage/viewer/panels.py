"""Which metrics make which chart, and the line that explains each: shared by report and viewer.

Rows of ``metrics.jsonl`` come in; charts go out, those without any data left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from forage.viewer.charts import Chart, Series, line_chart, stacked_chart

MetricRow = Mapping[str, float]

_HOPS = (1, 2, 3)


def learning_charts(rows: Sequence[MetricRow]) -> list[Chart]:
    """What the policy learnt: reward, exact match, searches, length, entropy."""
    charts = [
        line_chart(
            "Reward",
            "Mean reward of the sampled episodes. A step plays other questions than the one "
            "before, so single steps scatter.",
            _series(rows, {"reward/mean": "reward"}, ("s0",)),
            y_label="mean reward",
            y_range=(0.0, 1.0) if _fits_unit(rows, "reward/mean") else (None, None),
        ),
        line_chart(
            "Exact match by hops",
            "Share of sampled episodes whose answer equals a golden answer, by the number of "
            "passages that a question needs.",
            _by_hops(rows, "em"),
            y_label="exact match",
            y_range=(0.0, 1.0),
        ),
        line_chart(
            "Searches per question",
            "A policy that has learnt when to stop searches once for each hop: the lines settle "
            "at 1, 2 and 3.",
            _by_hops(rows, "searches"),
            y_label="searches",
            y_range=(0.0, None),
        ),
        line_chart(
            "Response length",
            "Tokens that the policy sampled in an episode; the prompt and what searches returned "
            "are not counted.",
            _series(rows, {"tokens/sampled_mean": "tokens"}, ("s0",)),
            y_label="tokens per episode",
            y_range=(0.0, None),
        ),
        line_chart(
            "Entropy",
            "Mean entropy of the distribution that tokens were sampled from. It falls as the "
            "policy makes up its mind; at zero it would explore no more.",
            _series(rows, {"policy/entropy": "entropy"}, ("s0",)),
            y_label="nats per token",
            y_range=(0.0, None),
        ),
    ]
    return [chart for chart in charts if chart is not None]


def health_charts(rows: Sequence[MetricRow]) -> list[Chart]:
    """Whether the run was sound: numerics, optimizer, time."""
    charts = [
        line_chart(
            "Sampler against trainer",
            "Largest difference between a token's log-probability when sampled and when trained, "
            "over all tokens of a step. With weights "
            "in float32 it stays below the dotted line. Logarithmic axis.",
            _series(rows, {"policy/logprob_diff_max": "difference"}, ("s0",)),
            y_label="nats",
            is_log=True,
            reference=(1e-5, "float32"),
            smooth=False,
        ),
        line_chart(
            "KL divergence",
            "How far a step's policy has moved from the one that sampled its tokens.",
            _series(rows, {"policy/kl": "KL"}, ("s0",)),
            y_label="nats per token",
        ),
        line_chart(
            "Gradient norm",
            "Length of the gradient. A sudden rise that stays is the first sign of a collapse.",
            _series(rows, {"optimizer/grad_norm": "norm"}, ("s0",)),
            y_label="before clipping",
            y_range=(0.0, None),
        ),
        line_chart(
            "Learning rate",
            "Step size of the optimizer, with its warm-up.",
            _series(rows, {"optimizer/learning_rate": "rate"}, ("s0",)),
            y_label="per step",
            y_range=(0.0, None),
            smooth=False,
        ),
        line_chart(
            "Clipped tokens",
            "Share of tokens whose probability ratio left the clip range, and so gave no gradient.",
            _series(rows, {"loss/clip_fraction": "clipped"}, ("s0",)),
            y_label="share of tokens",
            y_range=(0.0, None),
        ),
        line_chart(
            "Answered",
            "Episodes that end in an answer. The others ran out of turns or tokens, or met a "
            "failure.",
            _series(rows, {"episodes/answered": "answered"}, ("s0",)),
            y_label="share of episodes",
            y_range=(0.0, 1.0),
        ),
        stacked_chart(
            "Where the time goes",
            "Seconds of each step by phase, on top of each other. The wait for searches is part "
            "of the rollout: other episodes go on meanwhile.",
            _series(
                rows,
                {
                    "seconds/rollout": "rollout",
                    "seconds/train": "train",
                    "seconds/publish": "publish",
                    "seconds/record": "record",
                },
                ("p1", "p2", "p3", "p4"),
            ),
            y_label="seconds per step",
            x_label="optimizer step",
        ),
        line_chart(
            "Rollout speed",
            "Tokens sampled in a second of rollout, searches included.",
            _series(rows, {"rollout/tokens_per_s": "tokens"}, ("s0",)),
            y_label="tokens per second",
            y_range=(0.0, None),
        ),
        line_chart(
            "Failures and exclusions",
            "Searches that failed, episodes kept out of the loss, and transcripts that did not "
            "match what the engine saw (always 0 in a sound run).",
            _series(
                rows,
                {
                    "search/failures": "searches",
                    "episodes/excluded": "excluded",
                    "transcript/violations": "violations",
                },
                ("s1", "s2", "s3"),
            ),
            y_label="count per step",
            y_range=(0.0, None),
            smooth=False,
        ),
    ]
    return [chart for chart in charts if chart is not None]


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


def _by_hops(rows: Sequence[MetricRow], prefix: str) -> tuple[Series, ...]:
    names = {f"{prefix}/hops_{n}": f"{n} hop{'s' if n > 1 else ''}" for n in _HOPS}
    if any(name in row for row in rows for name in names):
        return _series(rows, names, ("s1", "s2", "s3"))
    return _series(rows, {f"{prefix}/mean": "mean"}, ("s0",))


def _series(
    rows: Sequence[MetricRow], names: Mapping[str, str], styles: Sequence[str]
) -> tuple[Series, ...]:
    """A series for each metric that some row holds; a row without it is a gap."""
    steps = tuple(row["step"] for row in rows)
    return tuple(
        Series(label, style, steps, tuple(row.get(name, math.nan) for row in rows))
        for (name, label), style in zip(names.items(), styles, strict=True)
        if any(name in row for row in rows)
    )


def _fits_unit(rows: Sequence[MetricRow], name: str) -> bool:
    return all(0 <= row[name] <= 1 for row in rows if math.isfinite(row.get(name, math.nan)))

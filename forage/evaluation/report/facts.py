"""How an evaluation was played, in words: what stands before the figures of every report."""

from __future__ import annotations

from forage.evaluation.fingerprint import Protocol, answers_text
from forage.evaluation.report.labels import arm_name
from forage.evaluation.result import EvaluationResult


def how_played(protocol: Protocol) -> str:
    """In one line: model, method, and how its answers were sampled."""
    return f"{protocol.model} · {protocol.method} · {answers_text(protocol)}"


def facts(result: EvaluationResult) -> list[tuple[str, str]]:
    """What to know before the figures: model, method, questions, sampling, retriever, failures."""
    protocol, summary = result.protocol, result.summary
    first = next(iter(summary.arms.values())).overall
    failures = [
        f"{arm_name(arm, protocol.searches)}: {count} {kind.replace('_', ' ')}"
        for arm, part in summary.arms.items()
        for kind, count in part.overall.failures.items()
    ]
    searches = {0: "no search", 1: "1 search at most"}
    return [
        ("model", protocol.model),
        ("method", protocol.method),
        ("questions", f"{first.num_questions:,}"),
        ("answers", answers_text(protocol)),
        ("retriever", _retriever_text(protocol)),
        (
            "prompt",
            f"{protocol.prompt} ({protocol.form}), "
            + searches.get(protocol.max_turns, f"{protocol.max_turns} searches at most"),
        ),
        ("failed searches and episodes", "; ".join(failures) or "none"),
    ]


def _retriever_text(protocol: Protocol) -> str:
    if not protocol.searches:
        return "none"
    passages = protocol.num_passages
    size = "" if passages is None else f" over {passages:,} passages"
    return f"{protocol.retriever or 'unknown'}{size}, top {protocol.topk}"

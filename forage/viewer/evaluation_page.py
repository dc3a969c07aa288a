"""The page of an evaluation: one HTML file with every figure, beside the published ones.

A finished evaluation goes in, ``eval.html`` comes out; it needs no server, network or other file.
Nothing here reads records or computes a figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forage.evaluation.published import shared_sources
from forage.evaluation.report.facts import facts, how_played
from forage.evaluation.report.figure_table import figure_text
from forage.evaluation.report.labels import ARM_NOTES, arm_name, hops_text, source_name
from forage.evaluation.report.published_tables import protocol_table, published_table
from forage.evaluation.report.tables import summary_tables
from forage.evaluation.result import EvaluationResult
from forage.evaluation.summary import ArmSummary
from forage.viewer.charts import IntervalChart, IntervalRow, interval_chart
from forage.viewer.pages import render_page, write_page
from forage.viewer.report import Card

_MAX_CARDS = 5  # what one row holds


@dataclass(frozen=True, slots=True)
class ShownChart:
    """A chart with its words; ``arms`` explains the arms where these are its rows."""

    title: str
    unit: str
    note: str
    drawn: IntervalChart
    arms: tuple[tuple[str, str], ...] = ()


def write_evaluation_page(path: Path, result: EvaluationResult) -> None:
    """Write the page, replacing an older one in one move; raises ``OSError``."""
    write_page(path, render_evaluation_page(result))


def render_evaluation_page(result: EvaluationResult) -> str:
    """The page as a text."""
    published = published_table(result)
    return render_page(
        "evaluation.html",
        result=result,
        headline=_cards(result),
        charts=_charts(result),
        how_played=how_played(result.protocol),
        tables=summary_tables(result.summary, result.protocol.searches, is_wide=True),
        published=published,
        differences=None if published is None else protocol_table(result),
        facts=facts(result),
    )


def _cards(result: EvaluationResult) -> list[Card]:
    """Exact match, its best of k, the other arms, searches, recall."""
    arms = result.summary.arms
    first_name, first = next(iter(arms.items()))
    em = first.headline
    over = "all questions" if first.macro is None else f"{first.macro.num_sources} sources"
    bounds = f"95 % interval {figure_text(em.low, 3)} to {figure_text(em.high, 3)}"
    label = "Exact match" if first_name == "normal" else f"Exact match, {arm_name(first_name)}"
    if result.protocol.num_candidates > 1:
        label += f", best of {result.protocol.num_candidates}"
    cards = [Card(f"{label}, {over}", figure_text(em.mean, 3), bounds)]
    for k, best in list(first.overall.pass_at.items())[-1:]:
        detail = "some answer of these is right"
        cards.append(Card(f"pass@{k}", figure_text(best.mean, 3), detail))
    cards += [
        Card(arm_name(arm).capitalize(), figure_text(part.headline.mean, 3), "exact match")
        for arm, part in arms.items()
        if arm != first_name and arm in ("closed_book", "gold")
    ]
    searches, recall = first.overall.searches, first.overall.gold_recall
    cards.append(
        Card(
            "Searches a question",
            figure_text(searches.mean),
            f"{figure_text(first.overall.sampled_tokens.mean, 0)} tokens, "
            f"{figure_text(first.overall.seconds.mean)} s an episode",
        )
    )
    if recall is not None and len(cards) < _MAX_CARDS:
        cards.append(Card("Gold recall", figure_text(recall.mean), "of the passages needed"))
    return cards


def _charts(result: EvaluationResult) -> list[ShownChart]:
    """The arms side by side, and the first of them by data source and hops."""
    arms = result.summary.arms
    charts: list[ShownChart] = []
    note = "Dots are means, whiskers 95 % bootstrap intervals over questions."
    if len(arms) > 1:
        rows = [IntervalRow(arm_name(a), None, part.headline, True) for a, part in arms.items()]
        notes = tuple((arm_name(arm), ARM_NOTES.get(arm, "")) for arm in arms)
        words = f"{note} The arms differ in what a search is answered with:"
        charts.append(ShownChart("Arms", "exact match", words, _chart(rows), notes))
    name, first = next(iter(arms.items()))
    title = arm_name(name, result.protocol.searches).capitalize()
    charts.append(ShownChart(title, "exact match", note, _parts(first)))
    return charts


def _parts(arm: ArmSummary) -> IntervalChart:
    rows = [IntervalRow("all questions", None, arm.overall.em, True)]
    if arm.macro is not None:
        rows.append(IntervalRow("mean of sources", None, arm.macro.em, True))
        # Published sets in their usual order, then the others.
        ordered = dict.fromkeys([*shared_sources(arm), *arm.by_source])
        rows += [IntervalRow(source_name(s), None, arm.by_source[s].em) for s in ordered]
    rows += [IntervalRow(hops_text(n), None, part.em) for n, part in arm.by_hops.items()]
    return _chart(rows)


def _chart(rows: list[IntervalRow]) -> IntervalChart:
    return interval_chart(rows, "exact match", ("", "exact match"))

"""The tables of a paired comparison, for terminal, Markdown and page; nothing is computed."""

from __future__ import annotations

from pathlib import Path

from forage.evaluation.comparison import ComparedArm, ComparedFigure, ComparedSlice, Comparison
from forage.evaluation.statistics import Interval
from forage.evaluation.tables import (
    Cell,
    FigureTable,
    Row,
    arm_name,
    escaped,
    figure_text,
    hops_text,
    source_name,
    to_markdown,
)

P_VALUES_NOTE = (
    "Paired by question; in brackets: 95 % bootstrap intervals. p: how often chance alone would "
    "give a difference as large, were there none; not corrected for the number of rows."
)


def comparison_table(arm: ComparedArm, names: tuple[str, str]) -> FigureTable:
    """One arm: exact match of both, the difference and its p-value, then F1 and searches."""
    rows = [Row("all questions", _cells(arm.overall), is_head=True)]
    if arm.macro is not None:
        rows.append(Row("mean of sources", _cells(arm.macro), is_head=True))
        rows += [Row(source_name(s.source or ""), _cells(s)) for s in arm.by_source]
    rows += [Row(hops_text(s.num_hops or 0), _cells(s)) for s in arm.by_hops]
    first, second = names
    columns = (
        *("questions", f"EM {first}", f"EM {second}", "difference", "p"),
        *("F1 difference", "p", "searches"),
    )
    return FigureTable(
        f"{second} against {first}: {arm_name(arm.arm)}", "", columns, tuple(rows), P_VALUES_NOTE
    )


def settings_table(comparison: Comparison) -> FigureTable | None:
    """What the episodes of both depend on and that is not the same; None where nothing differs."""
    if not comparison.differing:
        return None
    rows = [Row(name, (Cell(one), Cell(other))) for name, one, other in comparison.differing]
    return FigureTable(
        "What differs in how they were played",
        "",
        (comparison.first, comparison.second),
        tuple(rows),
        has_words=True,
    )


def left_out_text(arm: ComparedArm, comparison: Comparison) -> str:
    """Which questions were not compared, or nothing."""
    if not arm.num_only_first and not arm.num_only_second:
        return ""
    return (
        f"{arm_name(arm.arm)}: compared on {arm.overall.num_questions:,} common questions; "
        f"{arm.num_only_first:,} are in {comparison.first} alone and {arm.num_only_second:,} in "
        f"{comparison.second} alone."
    )


def write_comparison_markdown(path: Path, comparison: Comparison) -> None:
    """Write the tables as Markdown; raises ``OSError``."""
    names = (comparison.first, comparison.second)
    parts = [f"# {escaped(comparison.second)} against {escaped(comparison.first)}"]
    for arm in comparison.arms:
        table = comparison_table(arm, names)
        parts += [f"## {escaped(table.title)}", to_markdown(table)]
        if left_out := left_out_text(arm, comparison):
            parts.append(escaped(left_out))
    settings = settings_table(comparison)
    if settings is not None:
        parts += [f"## {settings.title}", to_markdown(settings)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8", errors="replace")


def p_text(p_value: float) -> str:
    """
    >>> p_text(0.00012), p_text(0.0234)
    ('< 0.001', '0.023')
    """
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def signed_cell(interval: Interval) -> Cell:
    return Cell(f"{interval.mean:+.3f}", f"[{interval.low:+.3f}, {interval.high:+.3f}]")


def _cells(part: ComparedSlice) -> tuple[Cell, ...]:
    em, f1, searches = (part.figure(metric) for metric in ("em", "f1", "searches"))
    return (
        Cell(f"{part.num_questions:,}"),
        Cell(figure_text(em.first, 3)),
        Cell(figure_text(em.second, 3)),
        *_difference(em),
        *_difference(f1),
        Cell(f"{searches.first:.2f} → {searches.second:.2f}"),
    )


def _difference(figure: ComparedFigure) -> tuple[Cell, Cell]:
    return signed_cell(figure.difference.interval), Cell(p_text(figure.difference.p_value))

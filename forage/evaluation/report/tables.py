"""The tables of an evaluation's figures, for terminal, Markdown and pages; nothing is computed.

By arm and hops, by data source, and before and after training. Each figure is a column that a
slice fills; which of them fit on a terminal is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forage.evaluation.report.figure_table import Cell, FigureTable, Row, figure_text, interval_cell
from forage.evaluation.report.labels import arm_name, hops_text, source_name
from forage.evaluation.summary import EvaluationSummary, MacroAverage, SliceSummary

INTERVALS_NOTE = "In brackets: 95 % bootstrap intervals over questions."
_MEAN_NOTE = (
    f"{INTERVALS_NOTE} The mean of sources is plain, each data source weighing the same, as the "
    "averages of published tables are."
)


@dataclass(frozen=True, slots=True)
class _Column:
    """A figure of a slice; of an average over sources where there is one. ``is_wide``: not in a
    terminal."""

    name: str
    of_slice: Callable[[SliceSummary], Cell]
    of_macro: Callable[[MacroAverage], Cell] = lambda _: Cell("")
    is_wide: bool = False


def summary_tables(
    summary: EvaluationSummary, searches: bool = True, is_wide: bool = False
) -> list[FigureTable]:
    """By arm and hops, and by data source where there are several; all figures if ``is_wide``.

    ``searches``: whether the method ever does.
    """
    tables = [arms_table(summary, searches, is_wide)]
    if any(arm.macro is not None for arm in summary.arms.values()):
        if is_wide:
            tables.insert(0, em_table(summary, searches))
        tables.append(sources_table(summary, searches, is_wide))
    return tables


def em_table(summary: EvaluationSummary, searches: bool = True) -> FigureTable:
    """Exact match at a glance: the arms beneath each other, the sources beside."""
    sources = list(dict.fromkeys(s for arm in summary.arms.values() for s in arm.by_source))
    rows = [
        Row(
            arm_name(name, searches),
            (
                interval_cell(arm.headline),
                *(
                    interval_cell(arm.by_source[source].em)
                    if source in arm.by_source
                    else Cell("–")
                    for source in sources
                ),
            ),
            is_head=True,
        )
        for name, arm in summary.arms.items()
    ]
    columns = ("mean of sources", *(source_name(source) for source in sources))
    return FigureTable(
        "Exact match by arm and data source", "arm", columns, tuple(rows), _MEAN_NOTE
    )


def arms_table(
    summary: EvaluationSummary, searches: bool = True, is_wide: bool = False
) -> FigureTable:
    """Every arm, as a whole and by number of hops."""
    columns = _columns(summary, is_wide)
    rows: list[Row] = []
    for arm, part in summary.arms.items():
        rows.append(Row(arm_name(arm, searches), _figures(part.overall, columns), is_head=True))
        rows += [Row(hops_text(n), _figures(s, columns)) for n, s in part.by_hops.items()]
    names = tuple(column.name for column in columns)
    return FigureTable("By arm and hops", "arm", names, tuple(rows), INTERVALS_NOTE)


def sources_table(
    summary: EvaluationSummary, searches: bool = True, is_wide: bool = False
) -> FigureTable:
    """Every arm by data source, with the average over sources that published tables give."""
    columns = _columns(summary, is_wide)
    rows: list[Row] = []
    for arm, part in summary.arms.items():
        if part.macro is not None:
            cells = tuple(column.of_macro(part.macro) for column in columns)
            rows.append(Row(f"{arm_name(arm, searches)}, mean", cells, is_head=True))
        rows += [Row(source_name(name), _figures(s, columns)) for name, s in part.by_source.items()]
    names = tuple(column.name for column in columns)
    return FigureTable("By data source", "source", names, tuple(rows), _MEAN_NOTE)


def before_after_table(before: EvaluationSummary, after: EvaluationSummary) -> FigureTable:
    """Exact match, F1 and searches of both, for the slices in both."""
    earlier = {(arm, hops): part for arm, hops, part in before.slices()}
    rows: list[Row] = []
    for arm, hops, now in after.slices():
        then = earlier.get((arm, hops))
        if then is None:
            continue
        cells = (
            Cell(f"{now.num_questions:,}"),
            interval_cell(then.em),
            interval_cell(now.em),
            Cell(f"{then.f1.mean:.2f} → {now.f1.mean:.2f}"),
            Cell(f"{then.searches.mean:.2f} → {now.searches.mean:.2f}"),
        )
        label = arm_name(arm) if hops is None else hops_text(hops)
        rows.append(Row(label, cells, is_head=hops is None))
    return FigureTable(
        "Before and after reinforcement learning",
        "arm",
        ("questions", "EM before", "EM after", "F1", "searches"),
        tuple(rows),
        INTERVALS_NOTE,
    )


def _columns(summary: EvaluationSummary, is_wide: bool) -> list[_Column]:
    ks = list(next(iter(summary.arms.values())).overall.pass_at)
    columns = [
        _Column("questions", lambda s: Cell(f"{s.num_questions:,}")),
        _Column(
            f"EM (avg@{max(ks)})" if ks else "EM",
            lambda s: interval_cell(s.em),
            lambda m: interval_cell(m.em),
        ),
        *(_pass_column(k, is_wide) for k in ks),
        _Column(
            "cover EM",
            lambda s: interval_cell(s.cover_em, has_bounds=is_wide),
            lambda m: interval_cell(m.cover_em, has_bounds=is_wide),
        ),
        _Column(
            "F1",
            lambda s: interval_cell(s.f1, has_bounds=is_wide),
            lambda m: interval_cell(m.f1, has_bounds=is_wide),
        ),
        _Column("searches", lambda s: interval_cell(s.searches, has_bounds=is_wide)),
        _Column("tokens", lambda s: interval_cell(s.sampled_tokens, 0), is_wide=True),
        _Column("seconds", lambda s: interval_cell(s.seconds), is_wide=True),
        _Column(
            "gold recall",
            lambda s: Cell("–") if s.gold_recall is None else interval_cell(s.gold_recall),
            is_wide=True,
        ),
        _Column("answered", lambda s: Cell(figure_text(s.answered))),
    ]
    return [column for column in columns if is_wide or not column.is_wide]


def _pass_column(k: int, is_wide: bool) -> _Column:
    return _Column(f"pass@{k}", lambda s: interval_cell(s.pass_at[k], has_bounds=is_wide))


def _figures(part: SliceSummary, columns: Sequence[_Column]) -> tuple[Cell, ...]:
    return tuple(column.of_slice(part) for column in columns)

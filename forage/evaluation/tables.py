"""Tables of figures, once, for the terminal, for Markdown and for the page.

Summaries and comparisons go in, tables of texts come out; who shows them decides how they look.
``to_rich`` is the terminal's, ``to_markdown`` the report's, and the viewer has a template of its
own. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forage.evaluation.published import literature, protocol_rows, shared_sources
from forage.evaluation.result import EvaluationResult
from forage.evaluation.statistics import Interval
from forage.evaluation.summary import EvaluationSummary, MacroAverage, SliceSummary

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ARM_NAMES = {
    "normal": "searching",
    "closed_book": "closed book",
    "empty": "empty results",
    "gold": "gold passages",
    "random": "random passages",
    "other_retriever": "other retriever",
}
ARM_NOTES = {
    "normal": "what the retriever finds",
    "closed_book": "nothing: there is no search, and the policy is told to answer from memory",
    "empty": "that nothing was found, each time",
    "gold": "always the right passages, so that only reading counts",
    "random": "passages drawn at random, which shows what chance gives",
    "other_retriever": "what another retriever finds",
}
INTERVALS_NOTE = "In brackets: 95 % bootstrap intervals over questions."
_MEAN_NOTE = (
    f"{INTERVALS_NOTE} The mean of sources is plain, each data source weighing the same, as the "
    "averages of published tables are."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure and, smaller, what is to be known about it."""

    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """``is_head``: it begins a group; ``is_own``: one's own figures among those of others."""

    label: str
    cells: tuple[Cell, ...]
    is_head: bool = False
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Columns of figures, or of words; the first column is the rows' labels."""

    title: str
    label: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""
    has_words: bool = False


@dataclass(frozen=True, slots=True)
class _Column:
    """A figure of a slice; of an average over sources where there is one. ``is_wide``: not in a
    terminal."""

    name: str
    of_slice: Callable[[SliceSummary], Cell]
    of_macro: Callable[[MacroAverage], Cell] = lambda _: Cell("")
    is_wide: bool = False


def summary_tables(summary: EvaluationSummary, is_wide: bool = False) -> list[FigureTable]:
    """By arm and hops, and by data source where there are several; all figures if ``is_wide``."""
    tables = [arms_table(summary, is_wide)]
    if any(arm.macro is not None for arm in summary.arms.values()):
        if is_wide:
            tables.insert(0, em_table(summary))
        tables.append(sources_table(summary, is_wide))
    return tables


def em_table(summary: EvaluationSummary) -> FigureTable:
    """Exact match at a glance: the arms beneath each other, the sources beside."""
    sources = list(dict.fromkeys(s for arm in summary.arms.values() for s in arm.by_source))
    rows = [
        Row(
            arm_name(name),
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


def arms_table(summary: EvaluationSummary, is_wide: bool = False) -> FigureTable:
    """Every arm, as a whole and by number of hops."""
    columns = _columns(summary, is_wide)
    rows: list[Row] = []
    for arm, part in summary.arms.items():
        rows.append(Row(arm_name(arm), _figures(part.overall, columns), is_head=True))
        rows += [Row(hops_text(n), _figures(s, columns)) for n, s in part.by_hops.items()]
    names = tuple(column.name for column in columns)
    return FigureTable("By arm and hops", "arm", names, tuple(rows), INTERVALS_NOTE)


def sources_table(summary: EvaluationSummary, is_wide: bool = False) -> FigureTable:
    """Every arm by data source, with the average over sources that published tables give."""
    columns = _columns(summary, is_wide)
    rows: list[Row] = []
    for arm, part in summary.arms.items():
        if part.macro is not None:
            cells = tuple(column.of_macro(part.macro) for column in columns)
            rows.append(Row(f"{arm_name(arm)}, mean", cells, is_head=True))
        rows += [Row(source_name(name), _figures(s, columns)) for name, s in part.by_source.items()]
    names = tuple(column.name for column in columns)
    return FigureTable("By data source", "source", names, tuple(rows), _MEAN_NOTE)


def published_table(result: EvaluationResult) -> FigureTable | None:
    """Published exact match on the sets that were evaluated; None where none was."""
    arm = result.summary.arms.get("normal")
    sources = [] if arm is None else shared_sources(arm)
    if arm is None or not sources:
        return None
    own = [interval_cell(arm.by_source[source].em, 3) for source in sources]
    average = Cell("")
    if len(sources) == len(arm.by_source):
        average = interval_cell(arm.headline, 3)
    rows = [Row(f"{result.name} (yours)", (*own, average), is_head=True, is_own=True)]
    for other in literature().results:
        cells = [Cell(figure_text(other.em[source], 3)) for source in sources]
        cells.append(Cell(figure_text(other.average_over(sources), 3)))
        rows.append(Row(f"{other.model} {other.method}", tuple(cells)))
    names = [source_name(source) for source in sources]
    over = "average" if len(sources) == len(literature().names) else f"average of {len(names)}"
    origins = "; ".join(f"{o.title}, {o.url}" for o in literature().origins.values())
    note = (
        f"Exact match. Trained on {literature().protocol.trained_on}. Published figures come "
        f"without intervals. Averages are plain means over the columns. Read in: {origins}."
    )
    return FigureTable("Beside published results", "model", (*names, over), tuple(rows), note)


def protocol_table(result: EvaluationResult) -> FigureTable:
    """What differs between the published protocol and this one, point by point."""
    rows = [
        Row(row.name, (Cell(row.there), Cell(row.here), Cell("differs" if row.differs else "same")))
        for row in protocol_rows(result.protocol, result.summary.arms["normal"])
    ]
    return FigureTable(
        "What differs in the protocol",
        "",
        ("published", "here", ""),
        tuple(rows),
        "A figure that differs in any of these is no reproduction, and no refutation either.",
        has_words=True,
    )


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


def to_rich(table: FigureTable) -> RichTable:
    """For a terminal."""
    from rich.table import Table

    shown = Table(title=table.title, title_justify="left", caption_justify="left")
    shown.add_column(table.label, no_wrap=True)
    for column in table.columns:
        shown.add_column(column, justify="left" if table.has_words else "right")
    has_groups = any(not row.is_head for row in table.rows)
    for number, row in enumerate(table.rows):
        if row.is_head and number and has_groups:
            shown.add_section()
        label = row.label if row.is_head or not has_groups else f"  {row.label}"
        shown.add_row(label, *(f"{c.text} {c.detail}".strip() for c in row.cells))
    shown.caption = table.note or None
    return shown


def to_markdown(table: FigureTable) -> str:
    """As GitHub's Markdown has it, the note beneath."""
    lines = [
        "| " + " | ".join((table.label or " ", *table.columns)) + " |",
        "|---|" + ("---|" if table.has_words else "---:|") * len(table.columns),
    ]
    for row in table.rows:
        label = escaped(row.label)
        cells = [f"{escaped(c.text)} {escaped(c.detail)}".strip() for c in row.cells]
        lines.append("| " + " | ".join((f"**{label}**" if row.is_head else label, *cells)) + " |")
    note = f"\n\n{escaped(table.note)}" if table.note else ""
    return "\n".join(lines) + note


def escaped(text: str) -> str:
    """Any text in Markdown: on one line, and no markup."""
    # Brackets stay: ours are around intervals, and none has an address behind it.
    for mark in ("\\", "|", "*", "_", "`", "<"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def facts(result: EvaluationResult) -> list[tuple[str, str]]:
    """What to know before the figures: model, questions, sampling, retriever, failures."""
    protocol, summary = result.protocol, result.summary
    first = next(iter(summary.arms.values())).overall
    sampling = "greedy, one answer a question"
    if protocol.temperature:
        sampling = f"{protocol.num_samples} a question at temperature {protocol.temperature:g}"
    passages = protocol.num_passages
    size = "" if passages is None else f" over {passages:,} passages"
    failures = [
        f"{arm_name(arm)}: {count} {kind.replace('_', ' ')}"
        for arm, part in summary.arms.items()
        for kind, count in part.overall.failures.items()
    ]
    return [
        ("model", protocol.model),
        ("questions", f"{first.num_questions:,}"),
        ("answers", sampling),
        ("retriever", f"{protocol.retriever or 'unknown'}{size}, top {protocol.topk}"),
        ("prompt", f"{protocol.prompt} ({protocol.form}), {protocol.max_turns} searches at most"),
        *([] if protocol.method == "search" else [("method", protocol.method)]),
        ("failed searches and episodes", "; ".join(failures) or "none"),
    ]


def arm_name(arm: str) -> str:
    return ARM_NAMES.get(arm, arm.replace("_", " "))


def source_name(source: str) -> str:
    return literature().names.get(source, source)


def hops_text(hops: int) -> str:
    return "1 hop" if hops == 1 else f"{hops} hops"


def interval_cell(interval: Interval, digits: int = 2, has_bounds: bool = True) -> Cell:
    if not has_bounds:
        return Cell(figure_text(interval.mean, digits))
    low, high = figure_text(interval.low, digits), figure_text(interval.high, digits)
    return Cell(figure_text(interval.mean, digits), f"[{low}, {high}]")


def figure_text(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}"


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

"""The tables beside published results: their figures and one's own, and what differs in how.

``published.py`` knows the figures; nothing is computed here.
"""

from __future__ import annotations

from forage.evaluation.published import literature, protocol_rows, shared_sources
from forage.evaluation.report.figure_table import Cell, FigureTable, Row, figure_text, interval_cell
from forage.evaluation.report.labels import source_name
from forage.evaluation.result import EvaluationResult


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
    method = "" if result.protocol.method == "search" else f", {result.protocol.method}"
    rows = [Row(f"{result.name} (yours{method})", (*own, average), is_head=True, is_own=True)]
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

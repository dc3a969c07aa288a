"""The report of an evaluation as Markdown, for a repository or a discussion.

A finished evaluation goes in, a text comes out. The page of the same content is the viewer's.
"""

from __future__ import annotations

from pathlib import Path

from forage.evaluation.report.facts import facts, how_played
from forage.evaluation.report.figure_table import escaped, to_markdown
from forage.evaluation.report.labels import ARM_NOTES, arm_name
from forage.evaluation.report.published_tables import protocol_table, published_table
from forage.evaluation.report.tables import summary_tables
from forage.evaluation.result import EvaluationResult


def write_markdown(path: Path, result: EvaluationResult) -> None:
    """Write the report; raises ``OSError``."""
    path.write_text(render_markdown(result), encoding="utf-8", errors="replace")


def render_markdown(result: EvaluationResult) -> str:
    """The whole report as a text."""
    searches = result.protocol.searches
    parts = [f"# Evaluation: {escaped(result.name)}"]
    parts.append(escaped(how_played(result.protocol)))
    if result.note:
        parts.append(escaped(result.note))
    parts.append("\n".join(f"- {name}: {escaped(value)}" for name, value in facts(result)))
    for table in summary_tables(result.summary, searches, is_wide=True):
        parts += [f"## {table.title}", to_markdown(table)]
    if searches:
        parts.append("What a search is answered with in each arm:")
        notes = [f"- {arm_name(arm)}: {ARM_NOTES.get(arm, '')}" for arm in result.summary.arms]
        parts.append("\n".join(notes))
    published = published_table(result)
    if published is not None:
        parts += [f"## {published.title}", to_markdown(published)]
        differences = protocol_table(result)
        parts += [f"### {differences.title}", to_markdown(differences)]
    parts += ["## What the episodes depend on", _fingerprint(result)]
    return "\n\n".join(parts) + "\n"


def _fingerprint(result: EvaluationResult) -> str:
    return "\n".join(f"- {escaped(k)}: {escaped(v)}" for k, v in result.fingerprint.items())

"""What ``forage doctor`` found: one line each, with what to do about it, and the table of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rich.table import Table


class Verdict(StrEnum):
    """What a finding means: no problem, slower or incomplete, or impossible."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``remedy`` says what the user can do, "" if nothing is wrong."""

    subject: str
    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""


def findings_table(
    findings: Iterable[Finding], title: str = "forage doctor", has_remedies: bool = True
) -> Table:
    """A line for each finding."""
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red"}
    table = Table(title=title, title_justify="left")
    for heading in ("", "what", "found", "what to do")[: 3 + has_remedies]:
        table.add_column(heading, overflow="fold")
    for finding in findings:
        mark = f"[{colours[finding.verdict]}]{finding.verdict.value}"
        texts = (finding.subject, finding.found, finding.remedy)[: 2 + has_remedies]
        table.add_row(mark, *(text.replace("[", r"\[") for text in texts))
    return table

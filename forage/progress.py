"""Progress bars on stderr in one style; without a terminal, a line in the log now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LOG = logging.getLogger(__name__)
LOG_EVERY_S = 60.0
"""Seconds between two lines of the log if there is no terminal."""


@dataclass(slots=True)
class Bar:
    progress: Progress
    task: TaskID
    logged_at: float = field(default_factory=lambda: time.monotonic())

    def advance(self, note: str | None = None) -> None:
        """Counts one more item; ``note`` replaces the text at the end of the line."""
        self.progress.advance(self.task)
        if note is not None:
            self.progress.update(self.task, note=note)
        self._log()

    def show(self, completed: int, note: str) -> None:
        """Sets what is completed and the text at the end of the line."""
        self.progress.update(self.task, completed=completed, note=note)
        self._log()

    def _log(self) -> None:
        now = time.monotonic()
        if self.progress.console.is_terminal or now < self.logged_at + LOG_EVERY_S:
            return
        self.logged_at = now
        task = next(task for task in self.progress.tasks if task.id == self.task)
        note, left_s = task.fields["note"], task.time_remaining
        LOG.info(
            "%s: %s of %s%s%s",
            task.description,
            f"{task.completed:,.0f}",
            f"{task.total or 0:,.0f}",
            f", {note}" if note else "",
            "" if left_s is None else f"; {timedelta(seconds=round(left_s))} left",
        )


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Bar]:
    """A bar that counts to ``total`` and remains on the screen afterwards."""
    progress = Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
    with progress:
        yield Bar(progress, progress.add_task(label, total=total, note=""))

"""Progress bars on stderr in one style; without a terminal nothing is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Bar:
    progress: Progress
    task: TaskID

    def advance(self, note: str | None = None) -> None:
        """Counts one more item; ``note`` replaces the text at the end of the line."""
        self.progress.advance(self.task)
        if note is not None:
            self.progress.update(self.task, note=note)

    def show(self, completed: int, note: str) -> None:
        """Sets what is completed and the text at the end of the line."""
        self.progress.update(self.task, completed=completed, note=note)


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

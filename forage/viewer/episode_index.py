"""An index of the episodes in a run's files, which is extended as the files grow.

The viewer asks for rows to list and for whole episodes to show. The index keeps where each line
begins and the few figures that lists show and filter by; whole episodes are read again from the
file. A damaged line is logged and left out.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from forage.episode_json import EpisodeRecord, record_from_json
from forage.records import EPISODES_FILE, METRICS_FILE

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode of the list; its line begins at byte ``offset`` of ``file``."""

    file: str
    offset: int
    step: int
    arm: str
    question_id: str
    question: str
    member: int
    num_hops: int | None
    status: str
    answer: str | None
    em: float | None
    reward: float | None
    num_searches: int


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes a list shows: each field as in the page's address, "" for all."""

    file: str = EPISODES_FILE
    step: str = ""
    arm: str = ""
    status: str = ""
    em: str = ""
    hops: str = ""

    def accepts(self, row: EpisodeRow) -> bool:
        em = "" if row.em is None else f"{row.em:g}"
        hops = "" if row.num_hops is None else str(row.num_hops)
        pairs = (
            (self.step.strip(), str(row.step)),
            (self.arm, row.arm),
            (self.status, row.status),
            (self.em, em),
            (self.hops, hops),
        )
        return all(wanted in ("", value) for wanted, value in pairs)


class EpisodeIndex:
    """The rows of every episode file of a run; several threads may use it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._rows: dict[str, list[EpisodeRow]] = {}
        self._inodes: dict[str, int] = {}
        self._read_to: dict[str, int] = {}

    def files(self) -> list[str]:
        """Paths of the episode files, relative to the run: the one of training first."""
        found = [*self._run_dir.glob("*.jsonl"), *self._run_dir.glob("evaluation/*.jsonl")]
        names = {path.relative_to(self._run_dir).as_posix() for path in found} - {METRICS_FILE}
        return sorted(names, key=lambda name: (name != EPISODES_FILE, name))

    def rows(self, wanted: EpisodeFilter) -> list[EpisodeRow]:
        """The rows that the filter accepts, in file order; none for an unknown file."""
        return [row for row in self._refreshed(wanted.file) if wanted.accepts(row)]

    def read(self, file: str, offset: int) -> EpisodeRecord | None:
        """The episode whose line begins at ``offset``; None if no listed line does."""
        if all(row.offset != offset for row in self._refreshed(file)):
            return None
        with (self._run_dir / file).open("rb") as stream:
            stream.seek(offset)
            return _record(file, offset, stream.readline())

    def _refreshed(self, file: str) -> list[EpisodeRow]:
        if file not in self.files():
            return []
        with self._lock:
            path = self._run_dir / file
            stat = path.stat()
            # A resumed run cuts its files, and an evaluation replaces its own: read those again.
            if (
                stat.st_size < self._read_to.get(file, 0)
                or self._inodes.get(file, stat.st_ino) != stat.st_ino
            ):
                self._rows.pop(file, None)
                self._read_to.pop(file, None)
            self._inodes[file] = stat.st_ino
            rows = self._rows.setdefault(file, [])
            with path.open("rb") as stream:
                offset = stream.seek(self._read_to.get(file, 0))
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    record = _record(file, offset, line)
                    if record is not None:
                        rows.append(_row(file, offset, record))
                    offset += len(line)
            self._read_to[file] = offset
            return list(rows)


def _record(file: str, offset: int, line: bytes) -> EpisodeRecord | None:
    try:
        return record_from_json(json.loads(line))
    except (KeyError, TypeError, ValueError) as error:
        LOG.warning("%s, byte %d: not an episode (%r), left out", file, offset, error)
        return None


def _row(file: str, offset: int, record: EpisodeRecord) -> EpisodeRow:
    episode = record.episode
    return EpisodeRow(
        file=file,
        offset=offset,
        step=record.step,
        arm=record.arm or "",
        question_id=episode.question.id,
        question=episode.question.text,
        member=episode.member,
        num_hops=episode.question.num_hops,
        status=episode.status.value,
        answer=episode.answer,
        em=episode.reward.parts.get("em") if episode.reward else None,
        reward=episode.reward.value if episode.reward else None,
        num_searches=episode.num_searches,
    )

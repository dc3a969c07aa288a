"""An index of an episode file, so that lists of 100,000 episodes open and page at once.

SQLite holds what a list shows of each episode, and the words of question, answer, queries and
passages; the line itself stays in the file. The index grows with the file, and is made anew where
the file was cut or replaced. It lies in a temporary directory of the viewer: a database in the
folder of a run would be as untrusted as its records. Which rows a list wants is
``episode_filter``'s.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from forage.episode_json import EpisodeRecord, record_from_json
from forage.errors import UserError
from forage.records import MAX_EPISODE_BYTES
from forage.remote.plain_file import open_plain
from forage.types import ActionKind, Origin, Turn
from forage.watch.step_report import signs_of

LOG = logging.getLogger(__name__)

_LINES_AT_ONCE = 1_000
_LINES_WHILE_WAITING = 2_000
"""Lines that a reader waits for; the rest of a long file is read behind its back."""
_MARK_BYTES = 4_096
_MAX_WORDS_CHARS = 50_000
_MAX_SHOWN = 1_000_000
"""Tokens, and turns, beyond which an episode is listed and not shown."""
NOT_AN_EPISODE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading a line raises that holds anything but an episode."""
_CJK = re.compile(r"([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])")
_TABLES = """
CREATE TABLE state (read_to INTEGER, changed INTEGER, head TEXT, tail TEXT);
CREATE TABLE episodes (
    offset INTEGER PRIMARY KEY, step INTEGER, arm TEXT, question_id TEXT, question TEXT,
    golden TEXT, source TEXT, member INTEGER, played_group INTEGER, chosen INTEGER, hops INTEGER,
    status TEXT, answer TEXT, em REAL, reward REAL, searches INTEGER, length INTEGER,
    alarms INTEGER, signs TEXT);
CREATE INDEX of_question ON episodes (question_id);
CREATE VIRTUAL TABLE words USING fts5(
    question, answer, query, passage, content='', tokenize='unicode61 remove_diacritics 2');
"""
_INSERT = f"INSERT INTO episodes VALUES ({', '.join('?' * 19)})"
_NULL = type(None)
_TYPES = (
    *((int,), (int,), (str,), (str,), (str,), (str,), (str,), (int,), (int, _NULL)),
    *((bool, _NULL), (int, _NULL), (str,), (str, _NULL), (float, _NULL), (float, _NULL)),
    *((int,), (int,), (int,), (str,)),
)
"""What each column of ``episodes`` may hold: SQLite takes anything."""
_INSERT_WORDS = "INSERT INTO words (rowid, question, answer, query, passage) VALUES (?, ?, ?, ?, ?)"


_Row = tuple[tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a file has been read, in bytes; ``has_more``: whole lines may follow."""

    read_to: int
    size: int
    has_more: bool


class EpisodeIndex:
    """The index of one episode file; several threads may use it."""

    def __init__(self, path: Path, database: Path) -> None:
        """Raises ``sqlite3.Error`` where the database cannot be written."""
        self.path = path
        self._database = database
        self._lock = threading.Lock()
        with closing(self._connect()) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            _make_tables(connection)

    def read_more(self, max_lines: int) -> Standing:
        """Take in lines that the file holds beyond the index, at most ``max_lines``."""
        with self._lock, closing(self._connect()) as connection, open_plain(self.path) as file:
            left = max_lines
            while True:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    start = _start(connection, file)
                    rows, end = _read(file, self.path, start, min(left, _LINES_AT_ONCE))
                    if end > start or start == 0:
                        connection.executemany(_INSERT, [row for row, _ in rows])
                        connection.executemany(_INSERT_WORDS, [words for _, words in rows])
                        _note(connection, file, end)
                left -= _LINES_AT_ONCE
                if end == start or left <= 0:
                    return Standing(end, file.seek(0, 2), has_more=end > start)

    def select(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with closing(self._connect()) as connection:
            return connection.execute(sql, values).fetchall()

    def record(self, offset: int) -> EpisodeRecord | None:
        """The episode whose line begins at ``offset``; None if no listed line does.

        Raises ``UserError`` for one that cannot be shown.
        """
        if not self.select("SELECT 1 FROM episodes WHERE offset = ?", (offset,)):
            return None
        place = f"{self.path}, byte {offset}"
        try:
            with open_plain(self.path) as file:
                file.seek(offset)
                record = record_from_json(json.loads(file.readline(MAX_EPISODE_BYTES)))
        except NOT_AN_EPISODE as error:
            raise UserError(f"{place} is not an episode: {error!r}") from error
        num_tokens = sum(len(segment.token_ids_T) for segment in record.episode.segments)
        if num_tokens + len(record.episode.turns) > _MAX_SHOWN:
            raise UserError(f"{place}: an episode of {num_tokens:,} tokens is too long to show")
        return record

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._database, timeout=60, isolation_level=None)
        # What a power cut destroys is made anew from the records.
        connection.execute("PRAGMA synchronous = OFF")
        return connection


class IndexStore:
    """The indexes of a viewer: where each lies, and the thread that reads long files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: dict[Path, EpisodeIndex] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="forage-view-")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="episode-index")
        self._being_read: set[Path] = set()
        self._is_closed = threading.Event()

    def of(self, path: Path) -> tuple[EpisodeIndex, Standing]:
        """The index of a file, with the newest lines; of a very long one the rest comes later."""
        with self._lock:
            index = self._indexes.get(path)
            if index is None:
                index = self._indexes[path] = self._open(path)
            is_being_read = path in self._being_read
        if is_being_read:
            (read_to,) = index.select("SELECT read_to FROM state")[0]
            return index, Standing(read_to, path.stat().st_size, has_more=True)
        standing = index.read_more(_LINES_WHILE_WAITING)
        if standing.has_more and standing.read_to < standing.size:
            with self._lock:
                if path not in self._being_read and not self._is_closed.is_set():
                    self._being_read.add(path)
                    self._reader.submit(self._read_rest, index)
        return index, standing

    def close(self) -> None:
        """Stop reading, and remove the indexes."""
        self._is_closed.set()
        self._reader.shutdown()
        self._directory.cleanup()

    def _open(self, path: Path) -> EpisodeIndex:
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return EpisodeIndex(path, Path(self._directory.name) / f"{name}.sqlite")

    def _read_rest(self, index: EpisodeIndex) -> None:
        try:
            while not self._is_closed.is_set() and index.read_more(_LINES_AT_ONCE).has_more:
                pass
        except (OSError, UserError, sqlite3.Error):
            LOG.exception("%s could not be indexed to its end", index.path)
        finally:
            with self._lock:
                self._being_read.discard(index.path)


def _make_tables(connection: sqlite3.Connection) -> None:
    """Empty tables in place of those that are there."""
    for table in ("state", "episodes", "words"):
        connection.execute(f"DROP TABLE IF EXISTS {table}")
    for statement in _TABLES.split(";"):
        connection.execute(statement)
    connection.execute("INSERT INTO state VALUES (0, 0, '', '')")


def _start(connection: sqlite3.Connection, file: BinaryIO) -> int:
    """Where reading goes on: behind what is indexed, or at 0 with empty tables.

    A resumed run cuts its file and grows it again, and a new evaluation replaces its own: what is
    indexed holds if the file still begins and goes on as it did, and a file that has not grown has
    not been written since either.
    """
    read_to, changed, head, tail = connection.execute(
        "SELECT read_to, changed, head, tail FROM state"
    ).fetchone()
    if read_to == 0:
        return 0
    size = file.seek(0, 2)
    is_same = size > read_to or (size == read_to and changed == _changed(file))
    if is_same and (head, tail) == _marks(file, read_to):
        return read_to
    _make_tables(connection)
    return 0


def _note(connection: sqlite3.Connection, file: BinaryIO, end: int) -> None:
    head, tail = _marks(file, end)
    connection.execute(
        "UPDATE state SET read_to = ?, changed = ?, head = ?, tail = ?",
        (end, _changed(file), head, tail),
    )


def _changed(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_mtime_ns


def _marks(file: BinaryIO, end: int) -> tuple[str, str]:
    """Hashes of the beginning and of the end of what lies before ``end``."""
    marks: list[str] = []
    for start in (0, max(0, end - _MARK_BYTES)):
        file.seek(start)
        marks.append(hashlib.sha256(file.read(min(_MARK_BYTES, end - start))).hexdigest())
    return marks[0], marks[1]


def _read(file: BinaryIO, path: Path, start: int, max_lines: int) -> tuple[list[_Row], int]:
    """Rows and words of the next lines, and where they end; a line being written is left."""
    rows: list[_Row] = []
    end = file.seek(start)
    for _ in range(max_lines):
        line = file.readline(MAX_EPISODE_BYTES)
        if not line.endswith(b"\n"):
            if len(line) == MAX_EPISODE_BYTES and not rows:
                raise UserError(f"{path}, byte {end}: a line of more than {len(line):,} bytes")
            break
        try:
            rows.append(_row(end, json.loads(line)))
        except NOT_AN_EPISODE as error:
            LOG.warning("%s, byte %d: not an episode (%r), left out", path, end, error)
        end += len(line)
    return rows, end


def _row(offset: int, line: dict[str, Any]) -> _Row:
    """What a list shows of an episode, and the words that it is found by."""
    # Tokens and log-probabilities are most of a line, and only counted here.
    length = sum(
        len(segment["token_ids"])
        for segment in line["segments"]
        if Origin(segment["origin"]).is_policys
    )
    record = record_from_json(line | {"segments": []})
    episode = record.episode
    question, reward, signs = episode.question, episode.reward, signs_of(episode)
    row = (
        *(offset, record.step, record.arm or "", _storable(question.id), _storable(question.text)),
        *(_storable(" / ".join(question.golden_answers)), _storable(question.source)),
        *(episode.member, record.group, record.is_chosen, question.num_hops),
        *(episode.status.value, None if episode.answer is None else _storable(episode.answer)),
        *(reward and reward.parts.get("em"), reward and reward.value),
        *(episode.num_searches, length, len(signs), ", ".join(signs)),
    )
    for value, types in zip(row, _TYPES, strict=True):
        if not isinstance(value, types) or (isinstance(value, int) and abs(value) >= 2**63):
            raise ValueError(f"{str(value)[:40]!r} is no {types[0].__name__} that a list can hold")
    queries = [str(value) for turn in episode.turns for value in _queries(turn)]
    passages = [turn.observation for turn in episode.turns]
    texts = (question.text, episode.answer or "", "\n".join(queries), "\n".join(passages))
    return row, (offset, *(split_cjk(_storable(text[:_MAX_WORDS_CHARS])) for text in texts))


def _queries(turn: Turn) -> list[Any]:
    """What a turn asked its tools: all arguments of their calls, or of one that was not run."""
    if not turn.calls:
        return [turn.argument] if turn.kind in (ActionKind.SEARCH, ActionKind.CALL) else []
    return [value for call in turn.calls for value in call.arguments.values()]


def split_cjk(text: str) -> str:
    """Chinese, Japanese and Korean characters as words of their own, since no space parts them."""
    return _CJK.sub(r" \1 ", text)


def _storable(text: str) -> str:
    """Text that SQLite can hold: no lone surrogates, no zero characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ")

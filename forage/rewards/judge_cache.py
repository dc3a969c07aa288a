"""The judge's replies on disk, so that the same question is paid for once, in all runs.

One SQLite file, which several processes may share. ``judge.py`` puts in replies that hold a verdict
and nothing else; failures are not remembered.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from pathlib import Path
from typing import Self

from forage.errors import UserError

LOG = logging.getLogger(__name__)


def cache_key(url: str, model: str, max_tokens: int, prompt: str) -> str:
    """A name for everything that the reply depends on."""
    text = json.dumps([url, model, max_tokens, prompt])
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class JudgeCache:
    """Replies by key."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._is_broken = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the file; raises ``UserError``."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=10, isolation_level=None)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"cannot use {path} as the judge's cache: {error}; choose another "
                "reward.judge.cache, or null for none"
            ) from error
        return cls(connection)

    def get(self, key: str) -> str | None:
        """The reply kept under ``key``, or None."""
        row = self._connection.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        """Keep ``reply``; a disk that takes no more is warned about once, the run goes on."""
        try:
            self._connection.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?)",
                (key, reply.encode("utf-8", "replace").decode("utf-8")),
            )
        except sqlite3.Error as error:
            if not self._is_broken:
                LOG.warning("the judge's cache keeps nothing more: %s", error)
            self._is_broken = True

    def close(self) -> None:
        self._connection.close()

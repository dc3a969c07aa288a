"""What the service serves: passages for a batch of queries, wherever they come from.

An opened index is a source, and so are a web provider, two sources fused, a source behind a
reranker, and a recording. They compose by holding one another; the server knows this protocol only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forage.types import Hit


class Source(Protocol):
    """Somewhere to search; called from one thread at a time."""

    @property
    def name(self) -> str:
        """What it is, for people and health checks: ``bm25``, ``bm25+flat``, ``serper``."""
        ...

    @property
    def id(self) -> str:
        """Changes when the same query may be answered differently: part of every cache's key."""
        ...

    @property
    def num_passages(self) -> int | None:
        """How many passages can be found; None where nobody knows (the web)."""
        ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query at most ``topk`` hits, best first; raises ``SourceError``."""
        ...

    def close(self) -> None:
        """Let go of files, processes and connections; harmless when repeated."""
        ...


class SourceError(Exception):
    """A source that could not answer: a typed failure for the caller, never an empty result."""

    def __init__(self, reason: str, is_temporary: bool = True) -> None:
        """``reason`` is said to clients, so it names no secret; a temporary one may be retried."""
        super().__init__(reason)
        self.reason = reason
        self.is_temporary = is_temporary

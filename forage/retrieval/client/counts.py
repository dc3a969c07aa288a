"""What a search client did so far, and the part of it that falls into one step of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forage.types import FailureKind


@dataclass(frozen=True, slots=True)
class SearchCounts:
    """Counts since the client was made.

    ``queries`` searches asked for, ``cache_hits`` of them answered at once; ``requests`` HTTP
    requests sent, ``retries`` of them after a failure, ``failovers`` of those to another server;
    ``ejections`` times that a server was left alone; ``failures`` searches that failed in the end,
    by kind; ``seconds`` the time that callers waited, added up.
    """

    queries: int = 0
    cache_hits: int = 0
    requests: int = 0
    retries: int = 0
    failovers: int = 0
    ejections: int = 0
    failures: Mapping[FailureKind, int] = field(default_factory=dict)
    seconds: float = 0.0

    def metrics_since(self, earlier: SearchCounts) -> dict[str, float]:
        """What was added to ``earlier``, by the names under which a run logs it."""
        queries = self.queries - earlier.queries
        cache_hits = self.cache_hits - earlier.cache_hits
        return {
            "search/queries": queries,
            "search/cache_hit_rate": cache_hits / queries if queries else 0.0,
            "search/requests": self.requests - earlier.requests,
            "search/retries": self.retries - earlier.retries,
            "search/failovers": self.failovers - earlier.failovers,
            "search/ejections": self.ejections - earlier.ejections,
            "seconds/search_mean": (self.seconds - earlier.seconds) / queries if queries else 0.0,
        }

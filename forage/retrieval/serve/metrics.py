"""The service's figures: one row of numbers a process, and all rows as Prometheus text.

A row may lie in memory that processes share, so that any of them can tell the figures of all.
Each process writes its own row only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, MutableSequence, Sequence
from enum import IntEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from forage.retrieval.source import SourceFacts


class Figure(IntEnum):
    """Where a figure stands in its row."""

    QUERIES = 0
    CACHE_HITS = 1
    JOINED = 2
    SEARCHES = 3
    SEARCHED_QUERIES = 4
    FAILED_QUERIES = 5
    SEARCH_SECONDS = 6
    IN_FLIGHT = 7
    RETRIEVE_SECONDS = 8


PATHS = ("/retrieve", "/access", "/healthz", "/readyz", "/metrics", "/", "/docs", "other")
STATUSES = (200, 400, 401, 404, 405, 413, 422, 429, 500, 502, 503, 504, 0)
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_FIRST_BUCKET = len(Figure)
_FIRST_REQUEST = _FIRST_BUCKET + len(BUCKETS_S) + 1
ROW_SIZE = _FIRST_REQUEST + len(PATHS) * len(STATUSES)
_PATH_PLACES = {path: _FIRST_REQUEST + i * len(STATUSES) for i, path in enumerate(PATHS)}
_STATUS_PLACES = {status: place for place, status in enumerate(STATUSES)}

_COUNTERS = (
    ("forage_queries", "Queries asked", Figure.QUERIES),
    ("forage_cache_hits", "Queries answered from the cache", Figure.CACHE_HITS),
    ("forage_joined_queries", "Queries that joined one in flight", Figure.JOINED),
    ("forage_searches", "Calls of the source", Figure.SEARCHES),
    ("forage_searched_queries", "Queries in calls of the source", Figure.SEARCHED_QUERIES),
    ("forage_failed_queries", "Queries that the source could not answer", Figure.FAILED_QUERIES),
    ("forage_search_seconds", "Time in the source", Figure.SEARCH_SECONDS),
)


class Figures:
    """The row that one process writes, beside the rows of the others."""

    def __init__(self, rows: Sequence[MutableSequence[float]] | None = None, own: int = 0) -> None:
        """``rows``: ``ROW_SIZE`` numbers each, shared or not, of which ``own`` is written here."""
        self._rows = [[0.0] * ROW_SIZE] if rows is None else rows
        self.row = self._rows[own]

    def sums(self) -> list[float]:
        """The figures of all processes, added up."""
        return [sum(column) for column in zip(*self._rows, strict=True)]

    def add(self, figure: Figure, amount: float = 1.0) -> None:
        """Count ``amount`` more."""
        self.row[figure] += amount

    def count_request(self, path: str, status: int) -> None:
        """Count a request as answered."""
        place = _PATH_PLACES.get(path, _PATH_PLACES["other"])
        self.row[place + _STATUS_PLACES.get(status, len(STATUSES) - 1)] += 1

    def observe_retrieve(self, seconds: float) -> None:
        """Count a retrieve request that was answered in this time."""
        self.row[_FIRST_BUCKET + bisect_left(BUCKETS_S, seconds)] += 1
        self.row[Figure.RETRIEVE_SECONDS] += seconds


def prometheus_text(figures: Figures, source: SourceFacts) -> bytes:
    """The figures of all processes in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sums(figures.sums(), source))
    return generate_latest(registry)


class _Sums(Collector):
    def __init__(self, sums: Sequence[float], source: SourceFacts) -> None:
        self._sums = sums
        self._source = source

    def collect(self) -> Iterator[Metric]:
        sums, source = self._sums, self._source
        yield InfoMetricFamily(
            "forage_source", "What is served", value={"name": source.name, "id": source.id}
        )
        if source.num_passages is not None:
            yield GaugeMetricFamily(
                "forage_passages", "Passages that can be found", value=source.num_passages
            )
        for name, help_text, figure in _COUNTERS:
            yield CounterMetricFamily(name, help_text, value=sums[figure])
        asked = sums[Figure.QUERIES]
        yield GaugeMetricFamily(
            "forage_cache_hit_rate",
            "Share of all queries so far that the cache answered",
            value=sums[Figure.CACHE_HITS] / asked if asked else 0.0,
        )
        yield GaugeMetricFamily(
            "forage_in_flight_requests", "Requests being answered", value=sums[Figure.IN_FLIGHT]
        )
        counts = accumulate(sums[_FIRST_BUCKET:_FIRST_REQUEST])
        edges = [*(str(edge) for edge in BUCKETS_S), "+Inf"]
        yield HistogramMetricFamily(
            "forage_retrieve_seconds",
            "Time to answer a retrieve request",
            buckets=list(zip(edges, counts, strict=True)),
            sum_value=sums[Figure.RETRIEVE_SECONDS],
        )
        yield self._requests()

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            "forage_requests", "Requests by path and status", labels=["path", "status"]
        )
        for path, first in _PATH_PLACES.items():
            for place, status in enumerate(STATUSES):
                if count := self._sums[first + place]:
                    family.add_metric([path, str(status) if status else "other"], count)
        return family

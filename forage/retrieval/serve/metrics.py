"""The service's figures: one row of numbers, and the row as Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
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

from forage.retrieval.source import Source


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
_ROW_SIZE = _FIRST_REQUEST + len(PATHS) * len(STATUSES)
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
    """The figures of a server since it started, in ``row``."""

    def __init__(self) -> None:
        self.row = [0.0] * _ROW_SIZE

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


def prometheus_text(figures: Figures, source: Source) -> bytes:
    """The figures in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(figures.row, source))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, row: Sequence[float], source: Source) -> None:
        self._row = row
        self._source = source

    def collect(self) -> Iterator[Metric]:
        row, source = self._row, self._source
        yield InfoMetricFamily(
            "forage_source", "What is served", value={"name": source.name, "id": source.id}
        )
        if source.num_passages is not None:
            yield GaugeMetricFamily(
                "forage_passages", "Passages that can be found", value=source.num_passages
            )
        for name, help_text, figure in _COUNTERS:
            yield CounterMetricFamily(name, help_text, value=row[figure])
        asked = row[Figure.QUERIES]
        yield GaugeMetricFamily(
            "forage_cache_hit_rate",
            "Share of all queries so far that the cache answered",
            value=row[Figure.CACHE_HITS] / asked if asked else 0.0,
        )
        yield GaugeMetricFamily(
            "forage_in_flight_requests", "Requests being answered", value=row[Figure.IN_FLIGHT]
        )
        counts = accumulate(row[_FIRST_BUCKET:_FIRST_REQUEST])
        edges = [*(str(edge) for edge in BUCKETS_S), "+Inf"]
        yield HistogramMetricFamily(
            "forage_retrieve_seconds",
            "Time to answer a retrieve request",
            buckets=list(zip(edges, counts, strict=True)),
            sum_value=row[Figure.RETRIEVE_SECONDS],
        )
        yield self._requests()

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            "forage_requests", "Requests by path and status", labels=["path", "status"]
        )
        for path, first in _PATH_PLACES.items():
            for place, status in enumerate(STATUSES):
                if count := self._row[first + place]:
                    family.add_metric([path, str(status) if status else "other"], count)
        return family

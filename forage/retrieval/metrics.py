"""The server's figures as Prometheus text, from a registry of their own.

What the batcher counts is read from it at each scrape rather than counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from forage.retrieval.batcher import BatcherCounts


class ServerMetrics:
    """Counts, times and gauges of one server."""

    def __init__(self, num_passages: int, read_counts: Callable[[], BatcherCounts]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "forage_requests",
            "Requests by path and status",
            ["path", "status"],
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "forage_in_flight_requests",
            "Retrieve requests being answered",
            registry=self._registry,
        )
        self.seconds = Histogram(
            "forage_retrieve_seconds",
            "Time to answer a retrieve request",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self._registry,
        )
        passages = Gauge("forage_passages", "Passages in the index", registry=self._registry)
        passages.set(num_passages)
        self._registry.register(_BatcherCollector(read_counts))

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)


class _BatcherCollector(Collector):
    def __init__(self, read_counts: Callable[[], BatcherCounts]) -> None:
        self._read_counts = read_counts

    def collect(self) -> Iterator[Metric]:
        counts = self._read_counts()
        for name, help_text, value in (
            ("forage_queries", "Queries asked", counts.queries),
            ("forage_cache_hits", "Queries answered from the cache", counts.cache_hits),
            ("forage_joined_queries", "Queries that joined one in flight", counts.joined),
            ("forage_searches", "Calls of the backend", counts.searches),
            ("forage_searched_queries", "Queries in calls of the backend", counts.searched_queries),
            ("forage_search_seconds", "Time in the backend", counts.seconds),
        ):
            yield CounterMetricFamily(name, help_text, value=value)

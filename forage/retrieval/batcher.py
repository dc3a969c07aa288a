"""Joins the queries of concurrent requests into one search, on the server's event loop.

While one search runs in the worker thread, queries that arrive queue up; when it ends, all of them
are the next search. Nothing waits on a clock, so a lone caller is served at once, and the busier
the server, the larger its batches. Identical queries in flight are searched once, and results are
cached. HTTP, limits and formats are the server's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from forage.retrieval.cache import LruCache
from forage.types import Hit


class SearchesPassages(Protocol):
    """What is searched: an ``Index``, or anything with its ``search``."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]: ...


@dataclass(frozen=True, slots=True)
class BatcherCounts:
    """What a batcher did so far; ``seconds`` is the time its searches took."""

    queries: int = 0
    cache_hits: int = 0
    joined: int = 0
    searches: int = 0
    searched_queries: int = 0
    seconds: float = 0.0


_Key = tuple[str, int]


class Batcher:
    """One owner of an index: every search of every request passes through here."""

    def __init__(
        self, index: SearchesPassages, max_batch: int = 256, cache_size: int = 10_000
    ) -> None:
        """``max_batch``: queries in one search; ``cache_size``: results kept (0: none)."""
        assert max_batch >= 1, "a batch holds at least one query"
        self._index = index
        self._max_batch = max_batch
        self._cache: LruCache[_Key, list[Hit]] = LruCache(cache_size)
        self._in_flight: dict[_Key, asyncio.Future[list[Hit]]] = {}
        self._queue: deque[_Key] = deque()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._draining: asyncio.Task[None] | None = None
        self.counts = BatcherCounts()

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The hits of each query, in the order asked; raises what the index raised."""
        found: list[list[Hit] | asyncio.Future[list[Hit]]] = [
            self._find((query, topk)) for query in queries
        ]
        futures = [outcome for outcome in found if isinstance(outcome, asyncio.Future)]
        if futures:
            # wait(), not gather(): a caller that goes away must not cancel what others wait for.
            await asyncio.wait(futures)
        return [
            outcome.result() if isinstance(outcome, asyncio.Future) else outcome
            for outcome in found
        ]

    async def close(self) -> None:
        """Finish what is queued, then end the worker."""
        if self._draining is not None:
            await self._draining
        self._worker.shutdown()

    def _find(self, key: _Key) -> list[Hit] | asyncio.Future[list[Hit]]:
        """The hits, where known; else the future that will hold them."""
        counts = self.counts
        self.counts = replace(counts, queries=counts.queries + 1)
        cached = self._cache.get(key)
        if cached is not None:
            self.counts = replace(self.counts, cache_hits=counts.cache_hits + 1)
            return cached
        if key in self._in_flight:
            self.counts = replace(self.counts, joined=counts.joined + 1)
            return self._in_flight[key]
        future = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        self._queue.append(key)
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        return future

    async def _drain(self) -> None:
        """Search until the queue is empty: what queued during a search is the next one."""
        loop = asyncio.get_running_loop()
        while self._queue:
            keys = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]
            # One search serves different topk: the first k of a longer result are the result of k.
            topk = max(k for _, k in keys)
            queries = list(dict.fromkeys(query for query, _ in keys))
            started = time.perf_counter()
            try:
                results = await loop.run_in_executor(
                    self._worker, self._index.search, queries, topk
                )
            except Exception as error:  # the boundary of the backend: its callers get the error
                for key in keys:
                    self._settle(key, error)
            else:
                hits_by_query = dict(zip(queries, results, strict=True))
                for key in keys:
                    self._settle(key, hits_by_query[key[0]][: key[1]])
            self._count_search(len(queries), time.perf_counter() - started)

    def _settle(self, key: _Key, outcome: list[Hit] | Exception) -> None:
        future = self._in_flight.pop(key)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
            future.exception()  # seen: no complaint if every caller has gone
        else:
            self._cache.put(key, outcome)
            future.set_result(outcome)

    def _count_search(self, num_queries: int, seconds: float) -> None:
        counts = self.counts
        self.counts = replace(
            counts,
            searches=counts.searches + 1,
            searched_queries=counts.searched_queries + num_queries,
            seconds=counts.seconds + seconds,
        )

"""Joins the queries of concurrent requests into one search, on the server's event loop.

While one search runs in the search thread, queries that arrive queue up; when it ends, all of them
are the next search. Nothing waits on a clock, so a lone caller is served at once, and the busier
the server, the larger its batches. Identical queries in flight are searched once, and results are
cached. HTTP, limits and formats are ``forage.retrieval.serve.server``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from forage.retrieval.cache import LruCache
from forage.retrieval.serve.metrics import Figure, Figures
from forage.retrieval.source import Source, SourceError
from forage.retrieval.wire import normalise_query
from forage.types import Hit

P = ParamSpec("P")
T = TypeVar("T")

# A normalised query, the number of hits wanted, and the id of the source.
_Key = tuple[str, int, str]


@dataclass(slots=True)
class _Wanted:
    """Hits on their way, and how many callers still wait for them."""

    hits: asyncio.Future[list[Hit]]
    num_waiting: int = 0


class Batcher:
    """One owner of a source: every search of every request passes through here."""

    def __init__(
        self,
        source: Source,
        figures: Figures | None = None,
        max_batch: int = 256,
        cache_size: int = 100_000,
    ) -> None:
        """``max_batch``: queries in one search; ``cache_size``: passages kept (0: none)."""
        assert max_batch >= 1, "a batch holds at least one query"
        self._source = source
        self._figures = figures or Figures()
        self._max_batch = max_batch
        self._cache: LruCache[_Key, list[Hit]] = LruCache(
            cache_size, weigh=lambda hits: max(1, len(hits))
        )
        self._in_flight: dict[_Key, _Wanted] = {}
        # By topk: a search for ten need not begin with the hits of a search for three.
        self._queues: OrderedDict[int, deque[_Key]] = OrderedDict()
        self._thread = SearchThread("search")
        self._draining: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Closed, and no search runs any more: the source may be closed."""
        return not self._thread.is_alive

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The hits of each query, in the order asked; raises what the source raised.

        An empty query has no hits, whatever the source. A caller that is cancelled takes nothing
        from the others, and what nobody waits for any more is not searched.
        """
        source_id = self._source.id
        found = [self._find((normalise_query(query), topk, source_id)) for query in queries]
        waiting = [outcome for outcome in found if isinstance(outcome, _Wanted)]
        if waiting:
            try:
                # wait(), not gather(): it leaves the shared futures alone when cancelled.
                await asyncio.wait([wanted.hits for wanted in waiting])
            finally:
                for wanted in waiting:
                    wanted.num_waiting -= 1
        return [
            outcome.hits.result() if isinstance(outcome, _Wanted) else outcome for outcome in found
        ]

    async def close(self, timeout_s: float = 2.0) -> None:
        """Finish the searches under way and queued, or give up on them after ``timeout_s``."""
        if self._draining is not None:
            _, unfinished = await asyncio.wait([self._draining], timeout=timeout_s)
            timeout_s = 0.0 if unfinished else timeout_s
        await self._thread.close(timeout_s)

    def _find(self, key: _Key) -> list[Hit] | _Wanted:
        """The hits where they are known, else a future of them."""
        self._figures.add(Figure.QUERIES)
        if not key[0]:
            return []
        cached = self._cache.get(key)
        if cached is not None:
            self._figures.add(Figure.CACHE_HITS)
            return cached
        wanted = self._in_flight.get(key)
        if wanted is None:
            wanted = self._in_flight[key] = _Wanted(asyncio.get_running_loop().create_future())
            self._queues.setdefault(key[1], deque()).append(key)
            if self._draining is None or self._draining.done():
                self._draining = asyncio.create_task(self._drain())
        else:
            self._figures.add(Figure.JOINED)
        wanted.num_waiting += 1
        return wanted

    async def _drain(self) -> None:
        """Search until the queues are empty: what queued during a search is the next one."""
        while self._queues:
            # Keys of one topk, oldest first; each topk in its turn.
            topk, queue = self._queues.popitem(last=False)
            keys: list[_Key] = []
            while queue and len(keys) < self._max_batch:
                key = queue.popleft()
                if self._in_flight[key].num_waiting:
                    keys.append(key)
                else:  # its callers ran out of time
                    self._in_flight.pop(key).hits.cancel()
            if queue:
                self._queues[topk] = queue
            if keys:
                await self._search(keys)

    async def _search(self, keys: Sequence[_Key]) -> None:
        started = time.perf_counter()
        try:
            queries, topk = [query for query, _, _ in keys], keys[0][1]
            hits_by_key = await self._thread.run(self._source.search, queries, topk)
            self._require_hits(hits_by_key, len(keys))
        except Exception as error:  # the boundary of the source: its callers get the error
            self._count(keys, started)
            is_passing = isinstance(error, SourceError) and error.is_temporary
            if is_passing or len(keys) == 1:
                self._fail(keys, error)
            else:
                # One query that the source cannot take must not fail those that travel with it.
                half = len(keys) // 2
                await self._search(keys[:half])
                await self._search(keys[half:])
        else:
            self._count(keys, started)
            for key, hits in zip(keys, hits_by_key, strict=True):
                self._cache.put(key, hits)
                self._in_flight.pop(key).hits.set_result(hits)

    def _require_hits(self, hits_by_key: Sequence[Sequence[Hit]], num_queries: int) -> None:
        """Raise ``SourceError`` for hits that no source may give."""
        if len(hits_by_key) != num_queries:
            raise SourceError(
                f"{self._source.name} gave {len(hits_by_key)} results for {num_queries} queries",
                is_temporary=False,
            )
        if not all(math.isfinite(hit.score) for hits in hits_by_key for hit in hits):
            raise SourceError(
                f"{self._source.name} gave a score that is not a number", is_temporary=False
            )

    def _fail(self, keys: Sequence[_Key], error: Exception) -> None:
        self._figures.add(Figure.FAILED_QUERIES, len(keys))
        for key in keys:
            future = self._in_flight.pop(key).hits
            future.set_exception(error)
            future.exception()  # seen: no complaint if every caller has gone

    def _count(self, keys: Sequence[_Key], started: float) -> None:
        self._figures.add(Figure.SEARCHES)
        self._figures.add(Figure.SEARCHED_QUERIES, len(keys))
        self._figures.add(Figure.SEARCH_SECONDS, time.perf_counter() - started)


class SearchThread:
    """One thread that calls are sent to from an event loop, in order, one at a time.

    A daemon, unlike the threads of an executor: a search that never returns must not keep a server
    that was told to stop from stopping.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``call`` returns or raises; a caller that is cancelled does not stop the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run_call() -> None:
            settle: Callable[[Any], None]
            try:
                settle, outcome = future.set_result, call(*args, **kwargs)
            except BaseException as error:  # it belongs to the caller, whatever it is
                settle, outcome = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop has gone, and the caller with it
                loop.call_soon_threadsafe(_unless_done, future, settle, outcome)

        self._calls.put(run_call)
        return await future

    @property
    def is_alive(self) -> bool:
        """Whether calls may come or one still runs."""
        return self._thread.is_alive()

    async def close(self, timeout_s: float) -> None:
        """End after the calls sent so far; those that take longer than ``timeout_s`` go on."""
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _unless_done(
    future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object
) -> None:
    if not future.done():
        settle(outcome)

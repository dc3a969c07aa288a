"""Joins the queries of concurrent requests into one search, on the server's event loop.

While one search runs in the search thread, requests stand in line; when it ends, the next search
takes one query of each in turn (``forage.retrieval.serve.turns``), until it is full. Nothing waits
on a clock, so a lone caller is served at once, and the busier the server, the larger its batches.
Identical queries of one search are searched once, and results are cached. Whether searches fail is
watched here, too. HTTP, limits and formats are ``forage.retrieval.serve.server``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from forage.retrieval.cache import CACHE_BYTES, LruCache, memory_of
from forage.retrieval.serve.limits import OverLimit
from forage.retrieval.serve.metrics import Figure, Figures
from forage.retrieval.serve.turns import Answered, Asked, Speed, Turns, weight_of
from forage.retrieval.source import Source, SourceError
from forage.retrieval.store.index_files import DamagedFileError
from forage.retrieval.wire import num_bytes_of
from forage.types import Hit

P = ParamSpec("P")
T = TypeVar("T")

# A normalised query, the number of hits wanted, and the id of the source.
_Key = tuple[str, int, str]

# Queries of one request that are looked up in the cache before another request has its turn.
_LOOK_UPS = 32
# Turns that one search may take: most of their queries may be known, and others wait as well.
_MAX_TURNS = 1024
_NOTHING = Answered([], 0)


class Batcher:
    """One owner of a source: every search of every request passes through here.

    ``failure`` is why a search failed in an unexpected way, until one succeeds. ``damage`` is which
    file of the source was cut: what else is read from it may be wrong without failing.
    """

    def __init__(
        self,
        source: Source,
        figures: Figures | None = None,
        cache_size: int = CACHE_BYTES,
    ) -> None:
        """``cache_size``: bytes of results kept in memory (0: none)."""
        self._source = source
        self._figures = figures or Figures()
        self._cache: LruCache[_Key, Answered] = LruCache(math.inf, cache_size)
        self._turns = Turns()
        # The search under way: who waits for each of its queries, and for which place.
        self._in_flight: dict[_Key, list[tuple[Asked, int]]] = {}
        self._speed = Speed()
        self._thread = WorkThread("search")
        self._draining: asyncio.Task[None] | None = None
        # The search that succeeded last (or failed first).
        self._tried: _Key | None = None
        self.failure: str | None = None
        self.damage: str | None = None

    @property
    def is_idle(self) -> bool:
        """Closed, and no search runs any more: the source may be closed."""
        return not self._thread.is_alive

    def seconds_until_one_leaves(self) -> float:
        """When the first of the requests in line will be answered, by the measured speed."""
        return self._speed.seconds(self._turns.weight_before_one_leaves)

    async def search(
        self,
        queries: Sequence[str],
        topk: int,
        address: str = "",
        max_bytes: float = math.inf,
        seconds: float = math.inf,
    ) -> list[list[Hit]]:
        """The hits of each query, in the order asked; raises what the source raised.

        ``queries`` are normalised (``wire.normalise_query``); an empty one has no hits, whatever
        the source. Requests of other addresses, and other requests of this one, take turns with
        it. A caller that is cancelled takes nothing from the others, and what nobody waits for any
        more is not searched. Raises ``OverLimit`` when a reply would have ``max_bytes``, and
        at once where the line is too long for an answer in ``seconds``.
        """
        self._figures.add(Figure.QUERIES, len(queries))
        asked = Asked(queries, topk, max_bytes)
        while self._next_key(asked) is None and not asked.is_over:
            await asyncio.sleep(0)
        if not asked.is_over:
            self._require_time(asked, address, seconds)
            self._turns.add(asked, address)
            if self._draining is None or self._draining.done():
                self._draining = asyncio.create_task(self._drain())
        if queries:
            await asked.done
        return asked.hits

    async def try_again(self) -> None:
        """Search as before: where no client asks any more, it shows whether searches fail still."""
        if self._tried is not None:
            await self._thread.run(self._searched, [self._tried])

    async def close(self, timeout_s: float = 2.0) -> None:
        """Finish the searches under way and queued, or give up on them after ``timeout_s``."""
        if self._draining is not None:
            _, unfinished = await asyncio.wait([self._draining], timeout=timeout_s)
            timeout_s = 0.0 if unfinished else timeout_s
        await self._thread.close(timeout_s)

    def _require_time(self, asked: Asked, address: str, seconds: float) -> None:
        """Raise ``OverLimit`` where others are in line and the request would be answered too late.

        It may come back when it would be in time even if it had to let all of them go first.
        """
        speed, turns = self._speed, self._turns
        if not turns:
            return  # whoever finds nobody before him is searched, however slow the source seemed
        needed = speed.seconds(turns.weight_before(asked, address, speed.weight(seconds)))
        if needed > seconds:
            line = speed.seconds(turns.weight)
            raise OverLimit(
                429,
                f"an answer would take {needed:.1f} s, and there are {seconds:.1f} s for it",
                min(line, line + speed.seconds(asked.weight) - seconds),
            )

    def _next_key(self, asked: Asked) -> _Key | None:
        """The next query of a request that must be searched; what is known before it is answered.

        None at the end of the request, and after ``_LOOK_UPS`` queries that were known.
        """
        source_id = self._source.id
        for _ in range(_LOOK_UPS):
            if asked.is_over:
                return None
            key = (asked.queries[asked.place], asked.topk, source_id)
            if not key[0]:
                asked.answer(asked.place, _NOTHING)
            elif (found := self._cache.get(key)) is not None:
                self._figures.add(Figure.CACHE_HITS)
                asked.answer(asked.place, found)
            elif (waiting := self._in_flight.get(key)) is not None:
                self._figures.add(Figure.JOINED)
                waiting.append((asked, asked.place))
            else:
                return key
            asked.place += 1
        return None

    async def _drain(self) -> None:
        """Search until nobody stands in line."""
        while self._turns:
            if keys := self._next_batch():
                await self._search(keys)
            else:
                await asyncio.sleep(0)

    def _next_batch(self) -> list[_Key]:
        """The queries of the next search, in turns, and all that is known before they are."""
        keys: list[_Key] = []
        weight, limit = 0.0, self._speed.batch_weight
        for number, asked in enumerate(self._turns.of_one_topk()):
            key = self._next_key(asked)
            if key is not None:
                self._in_flight[key] = [(asked, asked.place)]
                asked.place += 1
                keys.append(key)
                weight += weight_of(1, len(key[0]), key[1])
            if weight >= limit or number == _MAX_TURNS:
                break
        return keys

    async def _search(self, keys: Sequence[_Key]) -> None:
        started = time.perf_counter()
        try:
            found_by_key = await self._thread.run(self._searched, keys)
        except Exception as error:  # the boundary of the source: its callers get the error
            self._count(keys, started)
            is_passing = isinstance(error, SourceError) and error.is_temporary
            if is_passing or len(keys) == 1:
                self._fail(keys, error)
            else:
                # One query that the source cannot take must not fail those that travel with it.
                half = len(keys) // 2
                await self._search_wanted(keys[:half])
                await self._search_wanted(keys[half:])
        else:
            self._count(keys, started)
            for key, found in zip(keys, found_by_key, strict=True):
                self._cache.put(key, found, found.memory)
                for asked, place in self._in_flight.pop(key):
                    asked.answer(place, found)

    async def _search_wanted(self, keys: Sequence[_Key]) -> None:
        """Search what somebody still waits for."""
        wanted: list[_Key] = []
        for key in keys:
            if all(asked.done.done() for asked, _ in self._in_flight[key]):
                del self._in_flight[key]
            else:
                wanted.append(key)
        if wanted:
            await self._search(wanted)

    def _searched(self, keys: Sequence[_Key]) -> list[Answered]:
        """What the source finds, in the search thread; ``SourceError`` for what none may give."""
        name = self._source.name
        try:
            hits_by_key = self._source.search([query for query, _, _ in keys], keys[0][1])
        except SourceError:  # what it may say: a provider's refusal, a cluster out of reach
            raise
        except DamagedFileError as error:
            self.damage = self.failure = str(error)
            raise SourceError("a file of the index was cut; the server ends") from error
        except Exception as error:  # noted, and raised as it is
            self.failure = f"{type(error).__name__} in a search; the log says more"
            self._tried = self._tried or keys[0]
            raise
        self.failure, self._tried = None, keys[0]
        if len(hits_by_key) != len(keys):
            reason = f"{name} gave {len(hits_by_key)} results for {len(keys)} queries"
            raise SourceError(reason, is_temporary=False)
        if not all(math.isfinite(hit.score) for hits in hits_by_key for hit in hits):
            raise SourceError(f"{name} gave a score that is not a number", is_temporary=False)
        return [
            Answered(hits, num_bytes_of(hits), memory_of((key, hits)))
            for key, hits in zip(keys, hits_by_key, strict=True)
        ]

    def _fail(self, keys: Sequence[_Key], error: Exception) -> None:
        self._figures.add(Figure.FAILED_QUERIES, len(keys))
        for key in keys:
            for asked, _ in self._in_flight.pop(key):
                asked.fail(error)

    def _count(self, keys: Sequence[_Key], started: float) -> None:
        seconds = time.perf_counter() - started
        self._figures.add(Figure.SEARCHES)
        self._figures.add(Figure.SEARCHED_QUERIES, len(keys))
        self._figures.add(Figure.SEARCH_SECONDS, seconds)
        self._speed.add(sum(weight_of(1, len(query), topk) for query, topk, _ in keys), seconds)


class WorkThread:
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
                loop.call_soon_threadsafe(lambda: future.done() or settle(outcome))

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

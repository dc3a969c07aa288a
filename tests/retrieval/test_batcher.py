import asyncio
import threading
from collections.abc import Sequence

import pytest

from forage.retrieval.batcher import Batcher
from forage.types import Hit, Passage


def hits_for(query: str, topk: int) -> list[Hit]:
    return [Hit(Passage(f"{query}{row}", "", ""), float(-row)) for row in range(topk)]


class GatedIndex:
    """Remembers its searches; each waits at the gate while that is shut."""

    def __init__(self) -> None:
        self.searches: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.searches.append((list(queries), topk))
        self.entered.release()
        self.gate.wait()
        if "poison" in queries:
            raise RuntimeError("the backend broke")
        return [hits_for(query, topk) for query in queries]

    async def has_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire)


async def yield_often() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_lone_caller_is_searched_at_once():
    index = GatedIndex()
    batcher = Batcher(index)
    assert await batcher.search(["a"], 2) == [hits_for("a", 2)]
    assert index.searches == [(["a"], 2)]
    await batcher.close()


async def test_what_queues_during_a_search_is_the_next_search():
    index = GatedIndex()
    index.gate.clear()
    batcher = Batcher(index)
    first = asyncio.create_task(batcher.search(["first"], 1))
    await index.has_entered()
    others = [asyncio.create_task(batcher.search([q, f"{q}2"], 1)) for q in "abc"]
    await yield_often()
    index.gate.set()
    assert await first == [hits_for("first", 1)]
    assert [await other for other in others] == [
        [hits_for(q, 1), hits_for(f"{q}2", 1)] for q in "abc"
    ]
    assert index.searches == [(["first"], 1), (["a", "a2", "b", "b2", "c", "c2"], 1)]
    await batcher.close()


async def test_identical_queries_in_flight_are_searched_once_and_then_cached():
    index = GatedIndex()
    batcher = Batcher(index)
    found = await asyncio.gather(*(batcher.search(["same", "same"], 2) for _ in range(5)))
    assert found == [[hits_for("same", 2)] * 2] * 5
    assert await batcher.search(["same"], 2) == [hits_for("same", 2)]
    assert index.searches == [(["same"], 2)]
    counts = batcher.counts
    assert (counts.queries, counts.joined, counts.cache_hits, counts.searches) == (11, 9, 1, 1)
    await batcher.close()


async def test_callers_with_different_topk_share_a_search_and_get_their_own_length():
    index = GatedIndex()
    batcher = Batcher(index)
    found = await asyncio.gather(batcher.search(["a"], 1), batcher.search(["a", "b"], 4))
    assert found == [[hits_for("a", 1)], [hits_for("a", 4), hits_for("b", 4)]]
    assert index.searches == [(["a", "b"], 4)]
    await batcher.close()


async def test_a_long_queue_is_cut_into_batches_of_the_largest_size():
    index = GatedIndex()
    batcher = Batcher(index, max_batch=2)
    queries = ["a", "b", "c", "d", "e"]
    assert await batcher.search(queries, 1) == [hits_for(query, 1) for query in queries]
    assert [queries for queries, _ in index.searches] == [["a", "b"], ["c", "d"], ["e"]]
    await batcher.close()


async def test_a_caller_that_goes_away_takes_nothing_from_the_others():
    index = GatedIndex()
    index.gate.clear()
    batcher = Batcher(index)
    impatient = asyncio.create_task(batcher.search(["same"], 1))
    patient = asyncio.create_task(batcher.search(["same"], 1))
    await index.has_entered()
    impatient.cancel()
    await yield_often()
    index.gate.set()
    assert await patient == [hits_for("same", 1)]
    assert impatient.cancelled()
    await batcher.close()


async def test_a_broken_search_reaches_its_callers_and_the_next_one_works():
    batcher = Batcher(GatedIndex())
    with pytest.raises(RuntimeError, match="the backend broke"):
        await batcher.search(["poison"], 1)
    assert await batcher.search(["a"], 1) == [hits_for("a", 1)]
    await batcher.close()


async def test_no_query_gives_no_result():
    batcher = Batcher(GatedIndex())
    assert await batcher.search([], 3) == []
    await batcher.close()


async def test_closing_finishes_what_is_queued():
    index = GatedIndex()
    index.gate.clear()
    batcher = Batcher(index)
    asked = asyncio.create_task(batcher.search(["a"], 1))
    await index.has_entered()
    closing = asyncio.create_task(batcher.close())
    await yield_often()
    assert not closing.done()
    index.gate.set()
    await closing
    assert await asked == [hits_for("a", 1)]

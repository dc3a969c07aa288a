"""One request against all others: what a client may do, and what the others see of it.

Real servers over real HTTP. Addresses of 127.0.0.0/8 stand for machines.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forage.retrieval.serve.middleware import Limits
from forage.retrieval.wire import Page
from forage.types import Hit, Passage
from tests.retrieval.client.test_client import client_of
from tests.retrieval.conftest import StartServer
from tests.retrieval.fake_sources import GatedSource
from tests.retrieval.serve.test_server import HEAD, post, read_figures


@asynccontextmanager
async def connected(
    url: str, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection from an address of this machine."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(address, 0), limit=2**26
    )
    try:
        yield reader, writer
    finally:
        writer.close()


def post_bytes(body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"Content-Length: {len(content)}", *headers]
    return HEAD + "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def ask(url: str, body: dict[str, Any], address: str = "127.0.0.1") -> int:
    """The status of the reply."""
    async with connected(url, address) as (reader, writer):
        writer.write(post_bytes(body))
        return int((await reader.readline()).split()[1])


async def head_of(url: str, body: dict[str, Any]) -> bytes:
    """The head of the reply."""
    async with connected(url) as (reader, writer):
        writer.write(post_bytes(body))
        return await reader.readuntil(b"\r\n\r\n")


class SlowSource(GatedSource):
    """Every character takes its time."""

    def __init__(self, seconds_per_char: float) -> None:
        super().__init__()
        self._seconds_per_char = seconds_per_char

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        found = super().search(queries, topk)
        time.sleep(self._seconds_per_char * sum(map(len, queries)))
        return found


async def in_flight(url: str, number: int) -> None:
    """Return when so many requests are in flight."""
    async with asyncio.timeout(5):
        while (await read_figures(url))["forage_in_flight_requests",] != number:
            await asyncio.sleep(0.01)


async def test_a_request_of_many_queries_lets_another_clients_query_go_next(
    start_server: StartServer,
):
    """700 long queries were searched before the query that another client sent after them."""
    source = GatedSource()
    source.gate.clear()
    url = start_server(source=source)
    many = asyncio.create_task(ask(url, {"queries": [f"query {n}" for n in range(700)]}))
    await source.has_entered()
    lone = asyncio.create_task(ask(url, {"queries": ["lone"]}, "127.0.0.2"))
    await in_flight(url, 2)
    source.gate.set()
    assert await asyncio.gather(many, lone) == [200, 200]
    assert "lone" in source.searches[1][0]


async def test_a_search_of_long_queries_holds_few_of_them(start_server: StartServer):
    """256 queries of 20,000 characters were one search of 12 s, and whoever came next waited."""
    source = SlowSource(seconds_per_char=0.03 / 20_000)
    queries = [f"{n} " + "long " * 3999 for n in range(40)]
    assert await ask(start_server(source=source), {"queries": queries}) == 200
    assert max(len(searched) for searched, _ in source.searches) < 20


async def test_no_more_is_searched_for_a_client_that_has_gone(start_server: StartServer):
    """A client that left was noticed when its answer was sent: all its queries were searched."""
    source = GatedSource()
    source.gate.clear()
    url = start_server(source=source)
    async with connected(url) as (_, writer):
        writer.write(post_bytes({"queries": [f"query {n}" for n in range(700)]}))
        await source.has_entered()
    await in_flight(url, 0)
    source.gate.set()
    assert await ask(url, {"queries": ["next"]}) == 200
    assert len(source.searches) == 2
    assert source.searches[1] == (["next"], 3)


async def test_a_deadline_counts_while_searches_run(start_server: StartServer):
    """The batch under way was searched to its end: 256 queries, 5 s after the reply was 504."""
    source = SlowSource(seconds_per_char=0.002)
    url = start_server(Limits(deadline_s=0.2), source)
    assert await ask(url, {"queries": [f"query {n}" for n in range(256)]}) == 504
    await ask(url, {"queries": ["next"]})
    assert sum(len(queries) for queries, _ in source.searches) < 128


async def longest_silence(url: str, asked: asyncio.Task[int]) -> float:
    """The longest time in which /healthz did not answer while a request was, as a share of it."""
    started = last = time.perf_counter()
    longest = 0.0
    async with connected(url, "127.0.0.2") as (reader, writer):
        while not asked.done():
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            longest = max(longest, time.perf_counter() - last)
            last = time.perf_counter()
    return longest / (last - started)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"queries": [f"{n}" + "\u0301\u0316" * 9_000 for n in range(12)]}, 200),
        ({"queries": [f"{n}" for n in range(100_000)], "topk": 5000}, 400),
    ],
    ids=["marks", "queries"],
)
async def test_the_others_are_answered_while_a_large_body_is_read(
    start_server: StartServer, body: dict[str, Any], status: int
):
    """Reading and normalising held the event loop: 16 MB of marks kept /healthz silent for 94 s."""
    url = start_server(Limits(max_queries=100_000), GatedSource())
    asked = asyncio.create_task(ask(url, body))
    assert await longest_silence(url, asked) < 0.5
    assert await asked == status


async def test_a_large_body_of_too_many_values_is_refused(start_server: StartServer):
    url = start_server()
    assert await ask(url, {"queries": [], "unknown": [0] * 600_000}) == 413
    assert await ask(url, {"queries": [], "unknown": [[]] * 300_000}) == 413
    assert await ask(url, {"queries": ["engine"], "unknown": [0] * 100_000}) == 200


class WordySource(GatedSource):
    """Finds passages of 10,000 characters."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [
            [Hit(Passage(hit.passage.id, "", "text " * 2000), hit.score) for hit in hits]
            for hits in super().search(queries, topk)
        ]


async def test_a_reply_that_becomes_too_large_is_refused_before_all_is_searched(
    start_server: StartServer,
):
    """1,024 queries with topk 1,000 gave a reply of 254 MB, made of 1.9 GB of memory."""
    source = WordySource()
    body = {"queries": [f"query {n}" for n in range(1000)], "topk": 100}
    status, reply = await post(start_server(source=source), body)
    assert status == 413
    assert "queries (topk 100) have more than 67108864 bytes" in reply["detail"]
    assert "ask fewer queries at once, or a smaller topk" in reply["detail"]
    assert sum(len(queries) for queries, _ in source.searches) < 500


async def test_a_large_reply_is_streamed_while_others_are_answered(start_server: StartServer):
    """The event loop wrote a reply of 254 MB in one go, and answered nobody for 1.2 s."""
    body = {"queries": [f"query {n}" for n in range(40)], "topk": 100, "return_scores": True}
    url = start_server(source=WordySource())
    headers = await head_of(url, body)
    assert b"transfer-encoding: chunked" in headers
    status, reply = await post(url, body)
    assert (status, [len(found) for found in reply["result"]]) == (200, [100] * 40)
    assert reply["result"][39][99]["document"]["contents"].endswith("text text ")


async def test_pages_that_become_too_large_are_refused(start_server: StartServer):
    """Any number of whole pages was one reply."""

    class LargePages:
        num_read = 0

        def pages(self, urls: Sequence[str]) -> list[Page | None]:
            self.num_read += len(urls)
            return [Page(url=url, contents="é" * 10_000) for url in urls]

        def close(self) -> None: ...

    pages = LargePages()
    url = start_server(Limits(max_reply_bytes=10**6), pages=pages)
    status, reply = await post(url, {"urls": ["http://a"] * 1000}, "/access")
    assert (status, pages.num_read) == (413, 64)
    assert "ask for fewer at once, or for parts (max_chars, chunk)" in reply["detail"]
    status, reply = await post(url, {"urls": ["http://a"] * 40}, "/access")
    assert (status, len(reply["result"])) == (200, 40)


async def answered(url: str, num_queries: int, *headers: str) -> tuple[int, int]:
    """The status of a request of so many queries, and its ``Retry-After`` (0: none)."""
    body = {"queries": [f"{n} {time.perf_counter()}" for n in range(num_queries)]}
    async with connected(url) as (reader, writer):
        writer.write(post_bytes(body, *headers))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    wait = re.search(r"retry-after: (\d+)", head)
    return int(head.split()[1]), int(wait[1]) if wait else 0


async def test_who_cannot_be_answered_in_his_time_is_told_when_to_return_and_then_is(
    start_server: StartServer,
):
    """80 of 256 clients with 64 queries each got a 504, after their queries had been searched.

    ``Retry-After`` was always 1.
    """
    source = SlowSource(seconds_per_char=0.0002)  # 200 to 300 queries a second
    url = start_server(source=source)
    assert await answered(url, 64) == (200, 0)
    rollout = [asyncio.create_task(answered(url, 200)) for _ in range(3)]
    await in_flight(url, 3)
    num_searches = len(source.searches)
    status, wait = await answered(url, 100, "Prefer: respond-async, wait=0.5")
    assert status == 429
    assert len(source.searches) <= num_searches + 1, "it was refused at once"
    assert 1 <= wait <= 8
    await asyncio.sleep(wait)
    assert await answered(url, 100, "Prefer: wait=5") == (200, 0)
    assert await asyncio.gather(*rollout) == [(200, 0)] * 3


async def test_a_client_says_how_long_it_waits(start_server: StartServer):
    source = GatedSource()
    source.gate.clear()
    url = start_server(source=source)
    async with asyncio.timeout(5):
        assert await answered(url, 1, "Prefer: wait=0.1") == (504, 0)
        source.gate.set()
        assert await answered(url, 1, 'Prefer: wait="60"') == (200, 0)


async def test_our_own_client_says_how_long_it_waits_and_comes_back_when_told(
    start_server: StartServer,
):
    """It gave a try up after 10 s without a word, and the server searched on for nobody."""
    url = start_server(source=SlowSource(seconds_per_char=0.002))  # 55 queries a second
    async with client_of(url, timeout_s=1, deadline_s=20, max_queries_per_request=16) as client:
        await asyncio.gather(*(client.search(f"query {n}") for n in range(100, 132)))  # measured
        replies = await asyncio.gather(*(client.search(f"query {n}") for n in range(200, 360)))
    assert [reply.failure for reply in replies] == [None] * 160
    assert (await read_figures(url))["forage_requests_total", "/retrieve", "429"] >= 1

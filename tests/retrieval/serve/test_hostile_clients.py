"""One request against all others: what a client may do, and what the others see of it.

Real servers over real HTTP. Addresses of 127.0.0.0/8 stand for machines.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forage.retrieval.serve.middleware import Limits
from forage.types import Hit
from tests.retrieval.conftest import StartServer
from tests.retrieval.fake_sources import GatedSource
from tests.retrieval.serve.test_server import read_figures


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
    lines = ["POST /retrieve HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def ask(url: str, body: dict[str, Any], address: str = "127.0.0.1") -> int:
    """The status of the reply."""
    async with connected(url, address) as (reader, writer):
        writer.write(post_bytes(body))
        return int((await reader.readline()).split()[1])


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
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
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

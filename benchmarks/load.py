"""Closed-loop HTTP clients in a separate process, light enough to drive a server to its limit.

Each client keeps one connection: it sends a query, waits for the whole reply and sends the next. An
ordinary HTTP client costs several times as much per request as the measured server; on a machine
with two cores the load generator itself would be the limit. Used by the benchmarks and the soak.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

import uvloop


@dataclass(frozen=True, slots=True)
class Load:
    """The requests to send: ``num_requests`` in total, by ``num_clients`` in parallel.

    Each contains ``num_queries`` of the queries, taken in turn.
    """

    port: int
    queries: Sequence[str]
    num_requests: int
    num_clients: int
    topk: int = 3
    return_scores: bool = True
    num_queries: int = 1


@dataclass(slots=True)
class Outcome:
    """The result: seconds of each request in the order answered, statuses, the total time."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    total_s: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.seconds) / self.total_s

    def quantile_ms(self, share: float) -> float:
        """Milliseconds within which ``share`` of the requests were answered."""
        if len(self.seconds) < 2:
            return 1000 * self.seconds[0]
        return 1000 * statistics.quantiles(self.seconds, n=1000)[round(share * 1000) - 1]

    def __str__(self) -> str:
        wrong = {status: n for status, n in self.statuses.items() if status != 200}
        return (
            f"{self.per_second:8.0f} queries/s   p50 {self.quantile_ms(0.5):8.2f} ms   "
            f"p99 {self.quantile_ms(0.99):8.2f} ms" + (f"   not 200: {wrong}" if wrong else "")
        )


def drive(load: Load) -> Outcome:
    """Runs the clients in another process and waits for their results."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(load, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _run(load: Load, results: Connection) -> None:
    results.send(uvloop.run(_drive(load)))


async def _drive(load: Load) -> Outcome:
    outcome = Outcome()
    bodies = iter(range(load.num_requests))
    loop = asyncio.get_running_loop()
    clients: list[_Client] = []
    for _ in range(load.num_clients):
        _, client = await loop.create_connection(
            lambda: _Client(load, bodies, outcome), "127.0.0.1", load.port
        )
        clients.append(client)
    started = time.perf_counter()
    for client in clients:
        client.send_next()
    await asyncio.gather(*(client.done for client in clients))
    outcome.total_s = time.perf_counter() - started
    return outcome


class _Client(asyncio.Protocol):
    """One connection that has at most one request in flight."""

    def __init__(self, load: Load, numbers: Iterator[int], outcome: Outcome) -> None:
        self._load = load
        self._numbers = numbers
        self._outcome = outcome
        self._received = bytearray()
        self._sent_at = 0.0
        self._transport: asyncio.WriteTransport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not a subclass of asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def send_next(self) -> None:
        assert self._transport is not None, "connected before the first request"
        number = next(self._numbers, None)
        if number is None:
            self._transport.close()
            self.done.set_result(None)
            return
        load = self._load
        body = json.dumps(
            {
                "queries": [
                    load.queries[(number * load.num_queries + place) % len(load.queries)]
                    for place in range(load.num_queries)
                ],
                "topk": load.topk,
                "return_scores": load.return_scores,
            }
        ).encode()
        head = (
            "POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._sent_at = time.perf_counter()
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        if b"\r\ntransfer-encoding: chunked" in head:
            # Nothing else is in flight, and JSON contains no line break: the last chunk ends it.
            if not self._received.endswith(b"\r\n0\r\n\r\n"):
                return
        else:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            if len(self._received) < end + 4 + length:
                return
        self._outcome.seconds.append(time.perf_counter() - self._sent_at)
        self._outcome.statuses[int(head.split(b" ", 2)[1])] += 1
        self._received.clear()
        self.send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))

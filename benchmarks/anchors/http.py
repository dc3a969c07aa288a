"""The BM25 service over HTTP with 64 clients, as a share of the same index searched in process."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.anchors.bench import Bench, Task
from benchmarks.anchors.bm25 import forage_index
from benchmarks.anchors.passages import composition, questions, write_passages
from benchmarks.anchors.side import Side
from benchmarks.anchors.talk import Talk

NUM_CLIENTS = 64


def measure(bench: Bench) -> None:
    size = bench.pick(200_000, 1_000_000)
    corpus = write_passages(bench.folder, size)
    asked = {"queries": questions(bench.pick(2000, 4000))}
    asked |= {"index": str(forage_index(bench.folder, corpus, "auto"))}
    served = Side(
        "forage serve",
        "benchmarks.anchors.http:ask_service",
        f"`forage serve --cache-size 0`, one process; {NUM_CLIENTS} clients, a query per request, "
        f"best 3 with texts; the clients' process shares the cores; {composition(size)}",
        asked,
        ("uvicorn",),
        program="forage",
    )
    alone = Side(
        "in process",
        "benchmarks.anchors.http:search_in_process",
        "`open_index(DIR).search` with 64 queries per call, best 3 with texts, one thread",
        asked,
        ("numba",),
        program="forage",
    )
    request = {"num_requests": len(asked["queries"]), "num_clients": NUM_CLIENTS}
    what = f"{NUM_CLIENTS} clients, share of in-process"
    bench.race(served, [alone], [Task(what, "queries/s", {"in process": 0.6}, request)])


def ask_service(talk: Talk, index: str, queries: list[str]) -> None:
    from benchmarks.load import Load, drive
    from forage.retrieval.serve.child_server import ServerProcess

    command = [sys.executable, "-m", "forage", "serve", "--cache-size", "0"]
    with ServerProcess(Path(index), command=command) as server:
        talk.ready()
        for request in talk.requests():
            load = Load(server.port, queries, request["num_requests"], request["num_clients"])
            outcome = drive(load)
            assert set(outcome.statuses) == {200}, f"the service said {outcome.statuses}"
            talk.reply(value=outcome.per_second, p99_ms=outcome.quantile_ms(0.99))


def search_in_process(talk: Talk, index: str, queries: list[str]) -> None:
    from forage.retrieval.index.index import open_index

    with open_index(Path(index)) as opened:
        talk.ready(index=opened.name)
        for _ in talk.requests():
            started = time.perf_counter()
            for first in range(0, len(queries), NUM_CLIENTS):
                opened.search(queries[first : first + NUM_CLIENTS], 3)
            talk.reply(value=len(queries) / (time.perf_counter() - started))

"""Does the service's memory stay flat over many requests?

Starts ``forage serve`` over a generated encyclopedia and sends it requests from 64 clients. No
query is repeated (so that the cache turns over), and some requests are malformed, too large or
unauthorised. Prints the memory after each twentieth, and fails if the median of the last quarter
exceeds that of the previous quarter by more than ``--max-growth-mb``.

    python benchmarks/soak.py --requests 100000
    python benchmarks/soak.py --requests 45000 --size 2000 --encoder MODEL

With an encoder the index contains vectors, and batches of queries keep having new shapes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median

import psutil
from load import Load, drive

from forage.data.world.encyclopedia import write_world
from forage.retrieval.serve.child_server import ServerProcess

NUM_PARTS = 20
NUM_CLIENTS = 64
WRONG = (b"{", b'{"queries": [5]}', b'{"queries": ["' + b"a" * 30_000 + b'"]}', b"[" * 5000)


def memory_mb(pid: int) -> float:
    """Private memory of the server, without mapped files."""
    return psutil.Process(pid).memory_full_info().uss / 2**20


def send_wrong(url: str) -> None:
    """Sends one of each malformed request; all must be refused."""
    for body in WRONG:
        request = urllib.request.Request(f"{url}/retrieve", body)
        try:
            urllib.request.urlopen(request).close()
            status = 200
        except urllib.error.HTTPError as error:
            status = error.code
        assert 400 <= status < 500, f"HTTP {status} for a wrong request"


def build(directory: Path, encoder: str | None) -> None:
    """Indexes the corpus in ``directory``, by words or by an encoder's vectors."""
    command = [sys.executable, "-m", "forage", "--quiet", "index"]
    command += ["--corpus", str(directory / "corpus.jsonl"), "--out", str(directory / "index")]
    if encoder is not None:
        command += ["--backend", "flat", "--encoder", encoder]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=10_000, help="articles of the encyclopedia")
    parser.add_argument("--encoder", help="search this encoder's vectors instead of words")
    parser.add_argument("--max-growth-mb", type=float, default=5.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_world(directory, size=args.size, seed=0)
        build(directory, args.encoder)
        with (directory / "train.jsonl").open(encoding="utf-8") as lines:
            questions = [json.loads(line)["question"] for line in lines]
        number = itertools.count()
        command = [sys.executable, "-m", "forage", "serve", "--cache-size", "1000000"]
        with ServerProcess(directory / "index", command=command) as server:
            memory: list[float] = []
            for part in range(NUM_PARTS):
                size = args.requests // NUM_PARTS
                chosen = [f"{questions[next(number) % len(questions)]} {n}" for n in range(size)]
                queries = [f"{query} {part}" for query in chosen]
                load = Load(server.port, queries, size, NUM_CLIENTS, return_scores=part % 2 == 0)
                outcome = drive(load)
                assert set(outcome.statuses) == {200}, f"statuses: {outcome.statuses}"
                send_wrong(server.url)
                memory.append(memory_mb(server.pid))
                print(f"{(part + 1) * size:8d} requests  {memory[-1]:7.1f} MB  {outcome}")
    # Medians: a single reading may include the working memory of a batch, some 100 MB.
    third, fourth = memory[NUM_PARTS // 2 : NUM_PARTS * 3 // 4], memory[NUM_PARTS * 3 // 4 :]
    growth = median(fourth) - median(third)
    print(f"fourth quarter minus third: {growth:+.1f} MB (limit {args.max_growth_mb:g})")
    return int(growth > args.max_growth_mb)


if __name__ == "__main__":
    sys.exit(main())

"""How many episodes one driver can handle: thousands in flight against stand-in servers.

    python benchmarks/driver.py --in-flight 5000 --episodes 10000

The real player, engine client, server pool and search client of a run, over real HTTP, against two
stand-ins in separate processes. One implements vLLM's route for turns and answers after a second
(log-normal, one in a hundred takes ten) with a fixed search or answer; the other answers every
search after 100 ms. No model computes, so the driver's cost is all that is measured. The script
prints turns and searches per second, the driver's memory, and the largest delay of its event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import multiprocessing
import random
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import yaml

import forage
from forage.config.run_config import RunConfig, build_config
from forage.data.questions import read_questions
from forage.data.world.encyclopedia import write_world
from forage.hardware import loaded_objects_frozen
from forage.retrieval.client.client import SearchClient
from forage.retrieval.serve.port import bind_port
from forage.rollout.engines.servers.served_engine import ServedEngine
from forage.rollout.engines.servers.server_pool import ServerPool
from forage.rollout.engines.servers.vllm_server import VllmServer
from forage.rollout.play.player import Job, Player, play_all
from forage.training.model import load_tokenizer
from forage.types import Episode, Status

PACKAGE = Path(forage.__file__).parent
SEARCH = "<think> I do not know this yet, so I look it up. </think> <search> {} </search>"
ANSWER = "<think> The passage says it. </think> <answer> a town by the river </answer>"
NUM_DIFFERENT = 997
SEARCH_S = 0.1
TICK_S = 0.005
Handle = Callable[[dict[str, Any]], Awaitable[bytes]]


def serve(port: int, handle: Handle) -> None:
    """Serves each POST's document to ``handle``; a bare ASGI application, for speed."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message.get("body", b""), message.get("more_body", False)
        reply = await handle(json.loads(body)) if body else b"{}"
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    uvicorn.run(app, port=port, log_level="warning", access_log=False, backlog=8192)


def serve_turns(port: int, searches: list[list[int]], answer: list[int]) -> None:
    """Serves the three turns of an episode: two searches and an answer."""
    chance = random.Random(0)

    def reply(ids: list[int]) -> bytes:
        choice = {
            "token_ids": ids,
            "finish_reason": "stop",
            "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        }
        return json.dumps({"choices": [choice]}).encode()

    replies, last = [reply(ids) for ids in searches], reply(answer)
    seen: dict[str, int] = {}

    async def handle(document: dict[str, Any]) -> bytes:
        key = document["request_id"].rpartition("/")[0]
        seen[key] = seen.get(key, 0) + 1
        await asyncio.sleep(min(10.0, chance.lognormvariate(0.0, 1.0)))
        return last if seen[key] == 3 else replies[chance.randrange(len(replies))]

    serve(port, handle)


def serve_searches(port: int) -> None:
    """Serves the same three passages for every query."""
    text = "A passage of about a hundred words has some six hundred characters of text. " * 8
    hits = [
        {"document": {"id": str(n), "contents": f'"Title {n}"\n{text}'}, "score": 1.0 / (n + 1)}
        for n in range(3)
    ]

    async def handle(document: dict[str, Any]) -> bytes:
        await asyncio.sleep(SEARCH_S)
        return json.dumps({"result": [hits] * len(document["queries"])}).encode()

    serve(port, handle)


@dataclass(slots=True)
class Lateness:
    """How late the event loop ran each tick, and how long it worked, in seconds."""

    values: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            due, worked = time.perf_counter() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            self.values.append(time.perf_counter() - due)
            self.worked.append(time.thread_time() - worked)


@dataclass(slots=True)
class Collections:
    """Processor time of each garbage collection of the oldest generation, in seconds."""

    values: list[float] = field(default_factory=list)
    begun: float = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.begun = time.thread_time()
        elif info["generation"] == 2:
            self.values.append(time.thread_time() - self.begun)


def config_of(out: Path, search_url: str, in_flight: int) -> RunConfig:
    """The demo's recipe with thousands of episodes in flight."""
    tree: dict[str, Any] = yaml.safe_load((PACKAGE / "commands" / "demo.yaml").read_text())
    tree |= {"output_dir": str(out), "model": {"path": str(PACKAGE / "warm" / "model")}}
    tree["data"] = {"train": str(out / "train.jsonl")}
    tree["search"] |= {"url": search_url, "deadline_s": 120, "cache_size": 0}
    tree["rollout"] = {"max_concurrent_episodes": in_flight}
    return build_config(tree)


async def play(config: RunConfig, url: str, num_episodes: int) -> None:
    """Plays all episodes and prints the costs."""
    tokenizer = load_tokenizer(config.model)
    player = Player(config.environment, config.rollout, tokenizer, config.seed, config.search)
    assert config.data.train is not None
    questions = list(read_questions(config.data.train))
    in_flight = config.rollout.max_concurrent_episodes
    pool = ServerPool([VllmServer(url, 300.0, 60.0, in_flight)], 60.0)
    engine, search = ServedEngine(pool), SearchClient(config.search)
    pool.admit(pool.members[0])
    statuses: dict[Status, int] = {}
    num_events = 0

    def done(job: Job, episode: Episode) -> None:
        nonlocal num_events
        statuses[episode.status] = statuses.get(episode.status, 0) + 1
        num_events += len(episode.turns) + episode.num_searches

    jobs = [
        Job(questions[number % len(questions)], number, f"0/{number}/0")
        for number in range(num_episodes)
    ]
    player.check_prompts(questions)
    lateness, collections, process = Lateness(), Collections(), psutil.Process()
    gc.callbacks.append(collections)
    watcher = asyncio.create_task(lateness.watch())
    before, cpu, started = process.memory_info().rss, process.cpu_times(), time.perf_counter()
    await play_all(jobs, lambda job: player.play(job, engine, search), in_flight, done)
    seconds = time.perf_counter() - started
    after = process.cpu_times()
    watcher.cancel()
    await engine.close()
    await search.close()
    late = sorted(lateness.values)
    cpu_s = after.user + after.system - cpu.user - cpu.system
    print(
        f"{num_episodes} episodes, {in_flight} in flight: {seconds:.1f} s, "
        f"{num_events / seconds:.0f} turns and searches per second, {cpu_s / num_events * 1e6:.0f} "
        f"microseconds of processor time each; "
        f"{ {status.value: count for status, count in statuses.items()} }"
    )
    print(
        f"memory {before / 2**20:.0f} MB before, {process.memory_info().rss / 2**20:.0f} MB after: "
        f"{(process.memory_info().rss - before) / in_flight / 2**10:.0f} kB per episode in flight"
    )
    print(
        f"the event loop was late by {late[len(late) // 2] * 1e3:.1f} ms in the median, "
        f"{late[math.floor(len(late) * 0.99)] * 1e3:.0f} ms at the 99th percentile, "
        f"{late[-1] * 1e3:.0f} ms at worst; ticks late by over 100 ms: "
        f"{sum(each > 0.1 for each in late)} of {len(late)}"
    )
    worked = sorted(lateness.worked)
    print(
        f"its own work between two ticks (processor time, unaffected by other programs): "
        f"{worked[math.floor(len(worked) * 0.99)] * 1e3:.0f} ms at the 99th percentile, "
        f"{worked[-1] * 1e3:.0f} ms at most; over 100 ms: {sum(each > 0.1 for each in worked)}, "
        f"over 50 ms: {sum(each > 0.05 for each in worked)}; collections of the oldest generation: "
        f"{len(collections.values)}, {sum(collections.values):.2f} s in total, "
        f"{max(collections.values, default=0.0):.2f} s at most"
    )


def wait_until_open(ports: list[int]) -> None:
    """Returns when every port accepts connections."""
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=5000)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("runs/driver"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_world(args.out, size=2000, seed=0)
    ports: list[int] = []
    for _ in range(2):
        with bind_port("127.0.0.1", 0) as free:
            ports.append(free.getsockname()[1])
    turns_url, search_url = (f"http://127.0.0.1:{port}" for port in ports)
    config = config_of(args.out, search_url, args.in_flight)
    tokenizer = load_tokenizer(config.model)
    searches = [
        tokenizer.encode(SEARCH.format(f"town number {number}")) for number in range(NUM_DIFFERENT)
    ]
    spawn = multiprocessing.get_context("spawn").Process
    servers = [
        spawn(target=serve_turns, args=(ports[0], searches, tokenizer.encode(ANSWER)), daemon=True),
        spawn(target=serve_searches, args=(ports[1],), daemon=True),
    ]
    for server in servers:
        server.start()
    wait_until_open(ports)
    try:
        with loaded_objects_frozen(collects_old=False):  # as a run does
            asyncio.run(play(config, turns_url, args.episodes))
    finally:
        for server in servers:
            server.kill()


if __name__ == "__main__":
    main()

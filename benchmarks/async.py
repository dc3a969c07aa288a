"""What a staleness of one step gains where searches are slow: S = 1 against S = 0, run in turns.

    make vllm
    python benchmarks/async.py --out runs/async --steps 8 --pairs 3

The demo's recipe from the shipped warm start with a real vLLM server, or with ``--engine torch``.
Each search waits first: 300 ms in the median, with a heavy tail (log-normal, sigma 1: one of a
hundred waits 3 s). The runs of a pair have the same seed and the same number of episodes. Printed
for each: episodes a second of the steps after the first, and the exact match of a greedy
evaluation at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import forage
from forage import train
from forage.cluster.model_servers import OwnServers
from forage.cluster.places import LocalPlaces
from forage.config.run_config import RunConfig, build_config
from forage.config.server_config import VllmPlacement
from forage.data.world.encyclopedia import write_world
from forage.records import read_metrics
from forage.retrieval.client.client import SearchClient
from forage.retrieval.index.index import build_index
from forage.retrieval.serve.child_server import ServerProcess
from forage.types import SearchReply

PACKAGE = Path(forage.__file__).parent
MEDIAN_S, SIGMA, LONGEST_S = 0.3, 1.0, 10.0
PHASES = ("rollout", "train", "publish", "record", "checkpoint")
CONSTANT_RATE = {"learning_rate": 5e-5, "final_learning_rate_ratio": 1.0}
"""The rate of the runs in scale.md: with the demo's, a run of another length has other rates."""


class SlowSearchClient(SearchClient):
    """Each search waits before it is sent."""

    waits = random.Random(0)

    async def search(self, query: str) -> SearchReply:
        wait_s = self.waits.lognormvariate(math.log(MEDIAN_S), SIGMA)
        await asyncio.sleep(min(wait_s, LONGEST_S))
        return await super().search(query)


def config_of(args: argparse.Namespace, name: str, seed: int, **placement: Any) -> RunConfig:
    """The demo's recipe; ``name`` is the run's directory."""
    tree: dict[str, Any] = yaml.safe_load((PACKAGE / "commands" / "demo.yaml").read_text())
    tree |= {"seed": seed, "output_dir": str(args.out / name), "placement": placement}
    tree |= {"model": {"path": str(PACKAGE / "warm" / "model")}}
    world = args.out / "world"
    tree["data"] = {
        "train": str(world / "train.jsonl"),
        "test": str(world / "test.jsonl"),
        "index": str(world / "index"),
    }
    tree["search"]["deadline_s"] = 60
    tree["rollout"]["max_concurrent_episodes"] = 256
    tree["trainer"] |= {"num_steps": args.steps, "checkpoint_every": args.steps}
    tree["trainer"] |= {"questions_per_step": args.questions_per_step, "group_size": 4}
    tree["trainer"] |= CONSTANT_RATE
    tree["evaluation"] |= {"every": 0, "num_questions": args.questions, "arms": ["normal"]}
    tree["evaluation"] |= {"every": args.steps, "at_end": False}
    if placement:
        del tree["rollout"]["engine"]
    return build_config(tree, source=name)


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """``placement`` of all runs: one server for them all, so that none pays for its start."""
    if args.engine == "torch":
        yield {}
        return
    config = config_of(args, "servers", 0, engine={"kind": "vllm", "num_servers": 1})
    engine = config.placement.engine
    assert isinstance(engine, VllmPlacement)
    with asyncio.Runner() as runner:
        servers = OwnServers(config, engine, LocalPlaces(config).server_hosts)
        try:
            runner.run(servers.start())
            yield {"engine": {"kind": "vllm", "urls": list(servers.urls)}}
        finally:
            runner.run(servers.stop())


def run_once(config: RunConfig) -> tuple[float, float, dict[str, float]]:
    """Episodes a second after the first step, the exact match at the end, and medians by phase."""
    SlowSearchClient.waits.seed(config.seed)
    train.run_training(config, resume=False)
    rows: list[dict[str, Any]] = read_metrics(config.output_dir)
    phases = {phase: [row.get(f"seconds/{phase}", 0.0) for row in rows[1:]] for phase in PHASES}
    trainer = config.trainer
    num_episodes = (len(rows) - 1) * trainer.questions_per_step * trainer.group_size
    seconds = sum(map(sum, phases.values()))
    medians = {phase: median(values) for phase, values in phases.items()}
    return num_episodes / seconds, rows[-1]["eval/normal/em/mean"], medians


def main() -> None:
    parser = argparse.ArgumentParser(description="A staleness of one step against none")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", choices=("vllm", "torch"), default="vllm")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--questions-per-step", type=int, default=4)
    parser.add_argument("--questions", type=int, default=60, help="questions of the evaluation")
    parser.add_argument("--world-size", type=int, default=2000)
    args = parser.parse_args()
    world = args.out / "world"
    if not world.exists():
        write_world(world, args.world_size, seed=0)
        build_index(world / "corpus.jsonl", world / "index", show_progress=False)
    train.SearchClient = SlowSearchClient
    ratios: list[float] = []
    with ServerProcess(world / "index") as search, serving(args) as placement:
        for pair in range(args.pairs):
            speeds: dict[int, float] = {}
            for staleness in (0, 1) if pair % 2 == 0 else (1, 0):
                name = f"{args.engine}-pair{pair}-s{staleness}"
                tree = config_of(args, name, pair, **placement).model_dump(exclude_unset=True)
                tree["rollout"]["max_staleness"] = staleness
                tree["search"]["url"] = search.url
                speed, em, phases = run_once(build_config(tree, source=name))
                speeds[staleness] = speed
                load = os.getloadavg()[0]
                told = ", ".join(f"{phase} {value:.2f} s" for phase, value in phases.items())
                print(f"pair {pair}, S = {staleness}: {speed:.2f} episodes/s, EM {em:.3f}; {told}")
                print(f"    load average {load:.1f}", flush=True)
            ratios.append(speeds[1] / speeds[0])
            print(f"pair {pair}: S = 1 is {ratios[-1]:.2f} times S = 0", flush=True)
    print(f"median of {args.pairs} pairs: {median(ratios):.2f}")


if __name__ == "__main__":
    main()

"""The in-process engine with the demo's model, compared with ``generate`` turn by turn.

Both play the questions of the demo with its rules and its shipped warm start (``engine.py`` of the
benchmarks has the two ways); each search takes 50 to 200 ms.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.anchors.bench import Bench, Task
from benchmarks.anchors.demo_world import demo_config, demo_world
from benchmarks.anchors.side import Side
from benchmarks.anchors.talk import Talk
from benchmarks.anchors.torch_settings import in_words, recommended

if TYPE_CHECKING:
    from benchmarks.engine import Work

AIMS = {8: 5.0, 32: 4.0, 96: 3.0}


def measure(bench: Bench) -> None:
    arguments = {"world": str(demo_world(bench.folder)), "num_episodes": bench.pick(96, 384)}
    ours = Side(
        "forage engine",
        "benchmarks.anchors.engine:play_with_engine",
        "as in training: demo.yaml's engine with as many slots as episodes in flight, threads "
        "measured at the start",
        arguments,
        ("torch", "transformers"),
        program="forage",
    )
    theirs = Side(
        "generate",
        "benchmarks.anchors.engine:play_with_generate",
        "one left-padded batch of all episodes in flight, one call per turn, sdpa attention, "
        f"dynamic cache, float32; new episodes join between turns; {in_words()}",
        arguments,
        ("torch", "transformers"),
        recommended(),
    )
    tasks = [
        Task(f"{in_flight} in flight", "tokens/s", {"generate": aim}, {"in_flight": in_flight})
        for in_flight, aim in AIMS.items()
    ]
    bench.race(ours, [theirs], tasks)


def play_with_engine(talk: Talk, world: str, num_episodes: int) -> None:
    from forage.hardware import choose_matmul_kernel, quiet_openmp

    quiet_openmp()
    kernel = choose_matmul_kernel()
    from benchmarks.engine import event_driven

    work = _work(world, num_episodes)
    talk.ready(kernel=kernel)
    for request in talk.requests():
        result = asyncio.run(event_driven(work.with_in_flight(request["in_flight"])))
        talk.reply(value=result.tokens_per_s, tokens=result.num_tokens)


def play_with_generate(talk: Talk, world: str, num_episodes: int) -> None:
    import torch

    from benchmarks.engine import generate

    work = _work(world, num_episodes)
    talk.ready(threads=torch.get_num_threads())
    for request in talk.requests():
        result = generate(work, request["in_flight"])
        talk.reply(value=result.tokens_per_s, tokens=result.num_tokens)


def _work(world: str, num_episodes: int) -> Work:
    from benchmarks.engine import SlowSearch, Work
    from forage.data.questions import read_questions
    from forage.retrieval.index.index import open_index
    from forage.training.model import load_model, load_tokenizer

    config = demo_config(Path(world), Path(world) / "unused")
    search = SlowSearch(open_index(Path(world) / "index"), config.search.topk)
    questions = read_questions(Path(world) / "train.jsonl")[:num_episodes]
    return Work(config, load_model(config.model), load_tokenizer(config.model), questions, search)

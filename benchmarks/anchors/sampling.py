"""Sampling with SmolLM2: our engine, ``generate`` turn by turn, and a vLLM server.

All play the same scripted episodes, 16 in flight; a new one starts when one ends. Searches take no
time. Processors without bfloat16 arithmetic compute in float32, on all sides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.anchors.bench import Bench, Task
from benchmarks.anchors.machine import has_bfloat16
from benchmarks.anchors.scripted import MAX_TOKENS, Script, in_words, scripts
from benchmarks.anchors.side import Side
from benchmarks.anchors.smollm2 import smollm2
from benchmarks.anchors.talk import Talk
from benchmarks.anchors.torch_settings import in_words as torch_in_words
from benchmarks.anchors.torch_settings import recommended
from benchmarks.anchors.vllm_server import SETTINGS, vllm_server

IN_FLIGHT = 16
SampleTurn = Callable[[Script, int, list[int]], Awaitable[list[int]]]


def measure(bench: Bench) -> None:
    dtype = "bfloat16" if has_bfloat16() else "float32"
    arguments = {"model": str(smollm2(bench.folder)), "dtype": dtype}
    ours = Side(
        "forage engine",
        "benchmarks.anchors.sampling:sample_with_engine",
        f"{IN_FLIGHT} slots, tiles of 8 rows (real.yaml), threads measured at the start; products "
        f"in {dtype}; {in_words()}",
        arguments,
        ("torch", "transformers"),
        program="forage",
    )
    generate = Side(
        "generate",
        "benchmarks.anchors.sampling:sample_with_generate",
        f"one left-padded batch of all {IN_FLIGHT}, one call per turn, sdpa attention, dynamic "
        f"cache, weights in {dtype}; new episodes join between turns; {torch_in_words()}",
        arguments,
        ("torch", "transformers"),
        recommended(),
    )
    vllm = Side(
        "vLLM",
        "benchmarks.anchors.sampling:sample_with_vllm",
        f"a server on all cores, {SETTINGS}, {dtype}; token ids over HTTP, `ignore_eos`",
        {**arguments, "folder": str(bench.folder)},
        ("aiohttp",),
        program="forage",
    )
    num_episodes = bench.pick(IN_FLIGHT, 3 * IN_FLIGHT)
    task = Task(
        f"{IN_FLIGHT} in flight, {dtype}",
        "tokens/s",
        {"generate": 2.0, "vLLM": 1.0},
        {"num_episodes": num_episodes},
    )
    bench.race(ours, [generate, vllm], [task], warms_up=False)


def sample_with_engine(talk: Talk, model: str, dtype: str) -> None:
    from forage.hardware import choose_matmul_kernel, quiet_openmp

    quiet_openmp()
    kernel = choose_matmul_kernel()
    import torch

    from forage.config.model_config import ModelConfig
    from forage.config.placement_config import TorchPlacement
    from forage.rollout.engines.torch.stopping import StopTable
    from forage.rollout.engines.torch.torch_engine import TorchEngine
    from forage.training.model import load_model, load_tokenizer
    from forage.types import Sampling

    arithmetic = None if dtype == "float32" else dtype
    config = ModelConfig.model_validate({"path": model, "arithmetic": arithmetic})
    policy, stop = load_model(config), StopTable.of(load_tokenizer(config))
    policy.generation_config.eos_token_id = None
    placement = TorchPlacement(num_slots=IN_FLIGHT, tile_rows=8)

    async def play(episodes: Sequence[Script]) -> float:
        engine = TorchEngine(policy, stop, placement, MAX_TOKENS, dtype=getattr(torch, dtype))
        await engine.generate([1000], Sampling(1, (), (), "warm", 0))
        engine.release("warm")

        async def turn(script: Script, length: int, ids: list[int]) -> list[int]:
            sampling = Sampling(length, (), (), script.key, 0)
            return list((await engine.generate(ids, sampling)).token_ids_T)

        rate = await _play_all(episodes, turn, engine.release)
        await engine.close()
        return rate

    asyncio.run(play(scripts(Path(model), 10_000, 2)))
    talk.ready(kernel=kernel)
    for number, request in enumerate(talk.requests()):
        talk.reply(value=asyncio.run(play(scripts(Path(model), number, **request))))


def sample_with_vllm(talk: Talk, model: str, dtype: str, folder: str) -> None:
    import aiohttp

    async def play(url: str, episodes: Sequence[Script]) -> float:
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(900)) as http:

            async def turn(script: Script, length: int, ids: list[int]) -> list[int]:
                del script
                body: dict[str, Any] = {"model": "policy", "prompt": ids, "max_tokens": length}
                body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
                async with http.post("/v1/completions", json=body, raise_for_status=True) as reply:
                    return (await reply.json())["choices"][0]["token_ids"]

            return await _play_all(episodes, turn, lambda key: None)

    server = vllm_server(Path(model), dtype, MAX_TOKENS, IN_FLIGHT, Path(folder))
    if isinstance(server, str):
        talk.missing(server)
        return
    with server as (url, versions):
        asyncio.run(play(url, scripts(Path(model), 10_000, 2)))
        talk.ready(**versions)
        for number, request in enumerate(talk.requests()):
            talk.reply(value=asyncio.run(play(url, scripts(Path(model), number, **request))))


async def _play_all(
    episodes: Sequence[Script], turn: SampleTurn, ended: Callable[[str], object]
) -> float:
    """Sampled tokens per second of all episodes, ``IN_FLIGHT`` at a time."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def play(script: Script) -> None:
        async with room:
            ids = list(script.prompt)
            for number, length in enumerate(script.lengths):
                new = await turn(script, length, ids)
                assert len(new) == length, f"{len(new)} tokens instead of {length}"
                ids += new + (script.observations[number : number + 1] or [[]])[0]
            ended(script.key)

    started = time.perf_counter()
    await asyncio.gather(*map(play, episodes))
    return sum(each.num_sampled for each in episodes) / (time.perf_counter() - started)


def sample_with_generate(talk: Talk, model: str, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    policy.generation_config.eos_token_id = None
    generate: Any = policy.generate  # pyright: ignore[reportAttributeAccessIssue]  # a mixin's

    def batch(texts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        longest = max(map(len, texts))
        ids_BT = torch.tensor([[0] * (longest - len(ids)) + ids for ids in texts])
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in texts])
        with torch.inference_mode():
            out_BT = generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=max(lengths),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        return [
            row[longest:][:length] for row, length in zip(out_BT.tolist(), lengths, strict=True)
        ]

    def play(episodes: Sequence[Script]) -> float:
        waiting = [(script, 0, list(script.prompt)) for script in reversed(episodes)]
        active: list[tuple[Script, int, list[int]]] = []
        started = time.perf_counter()
        while waiting or active:
            while waiting and len(active) < IN_FLIGHT:
                active.append(waiting.pop())
            lengths = [script.lengths[number] for script, number, _ in active]
            sampled = batch([ids for _, _, ids in active], lengths)
            active = [
                (script, number + 1, [*ids, *new, *script.observations[number]])
                for (script, number, ids), new in zip(active, sampled, strict=True)
                if number + 1 < len(script.lengths)
            ]
        return sum(each.num_sampled for each in episodes) / (time.perf_counter() - started)

    play(scripts(Path(model), 10_000, 2))
    talk.ready(threads=torch.get_num_threads())
    for number, request in enumerate(talk.requests()):
        talk.reply(value=play(scripts(Path(model), number, **request)))

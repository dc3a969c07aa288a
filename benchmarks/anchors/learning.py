"""A learning step's arithmetic, as a share of the rate of the same matrix products alone.

A step is forward and backward of the recipe's micro-batches, full of episodes of equal length, with
the choices that a run makes by itself. The anchor is ``torch.mm`` of every linear layer's products
(one forward, two backward) with as many rows and in the same type, with nothing between them:
attention, normalisation, activations, loss and sums of gradients cost it nothing.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.anchors.bench import Bench, Task
from benchmarks.anchors.demo_world import demo_config, demo_world
from benchmarks.anchors.machine import num_cores
from benchmarks.anchors.side import Side
from benchmarks.anchors.smollm2 import real_config, smollm2
from benchmarks.anchors.talk import Talk

if TYPE_CHECKING:
    from forage.config.run_config import RunConfig

NUM_MICRO_BATCHES = {"demo": 6, "smollm2": 2}
EPISODE_TOKENS, SAMPLED_SHARE = 384, 0.35
AIMS = {"demo": 0.45, "smollm2": 0.75}


def measure(bench: Bench) -> None:
    demo_world(bench.folder)
    smollm2(bench.folder)
    for model, aim in AIMS.items():
        arguments = {"model": model, "folder": str(bench.folder)}
        ours = Side(
            f"learning {model}",
            "benchmarks.anchors.learning:learn",
            f"{NUM_MICRO_BATCHES[model]} micro-batches of the recipe's size, episodes of "
            f"{EPISODE_TOKENS} tokens, {SAMPLED_SHARE} of them sampled; all else is chosen by the "
            "run",
            arguments,
            ("torch", "transformers"),
            program="forage",
        )
        theirs = Side(
            f"products {model}",
            "benchmarks.anchors.learning:multiply",
            "`torch.mm` alone with the step's shapes and type, a micro-batch per core on a thread "
            "each or one over all cores, whichever is faster; torch's own OpenMP with its defaults",
            arguments,
            ("torch",),
        )
        what = f"{'SmolLM2' if model == 'smollm2' else 'demo model'}, share of the matrix rate"
        task = Task(what, "tokens/s", {theirs.name: aim})
        bench.race(ours, [theirs], [task], warms_up=model == "demo")


def config_of(model: str, folder: str) -> RunConfig:
    """The recipe; bfloat16 where ``forage real`` would choose it."""
    from forage.hardware import MIN_BFLOAT16_GAIN, bfloat16_gain

    if model == "demo":
        return demo_config(Path(folder) / "demo-world", Path(folder) / "unused")
    arithmetic = "bfloat16" if bfloat16_gain() >= MIN_BFLOAT16_GAIN else None
    return real_config(smollm2(Path(folder)), Path(folder) / "unused", arithmetic)


def learn(talk: Talk, model: str, folder: str) -> None:
    from forage.hardware import choose_matmul_kernel, quiet_openmp

    quiet_openmp()
    import torch

    from forage.algorithms.packing import lay_end_to_end
    from forage.models.attention import install
    from forage.plan.fit_here import fit_here
    from forage.training.gradients import accumulate
    from forage.training.logprobs import token_logprobs
    from forage.training.model import load_model

    kernel = choose_matmul_kernel()
    config = fit_here(config_of(model, folder))
    policy = load_model(config.model)
    install(policy)
    tokens = config.trainer.max_tokens_per_micro_batch
    num_rows = tokens // EPISODE_TOKENS
    ids = torch.arange(EPISODE_TOKENS).remainder(policy.config.vocab_size - 10).tolist()
    packed = lay_end_to_end([ids] * num_rows)
    wanted = packed.positions_N >= round(EPISODE_TOKENS * (1 - SAMPLED_SHARE))

    def loss() -> tuple[torch.Tensor, None]:
        return -token_logprobs(policy, packed, wanted, 1.0)[0].sum(), None

    at_once = config.trainer.micro_batches_at_once
    kind = config.model.arithmetic or config.model.dtype
    losses = [loss] * NUM_MICRO_BATCHES[model]
    accumulate(policy, losses[:1], at_once)  # kernels are prepared, memory is taken
    talk.ready(kernel=kernel, at_once=at_once or num_cores(), type=kind, micro_batch=tokens)
    for _ in talk.requests():
        started = time.perf_counter()
        accumulate(policy, losses, at_once)
        seconds = time.perf_counter() - started
        talk.reply(value=len(losses) * num_rows * EPISODE_TOKENS / seconds)


def multiply(talk: Talk, model: str, folder: str) -> None:
    import torch

    from forage.hardware import choose_matmul_kernel
    from forage.training.model import load_model

    kernel = choose_matmul_kernel()  # the faster one on some processors, and as exact
    config = config_of(model, folder)
    dtype = getattr(torch, config.model.arithmetic or config.model.dtype)
    policy = load_model(config.model)
    rows = config.trainer.max_tokens_per_micro_batch // EPISODE_TOKENS * EPISODE_TOKENS
    head = policy.get_output_embeddings()
    assert head is not None, "a causal model has a head"
    shapes = [
        (round(rows * (SAMPLED_SHARE if module is head else 1)), *module.weight.shape)
        for module in policy.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    operands = {
        shape: (
            torch.randn(shape[0], shape[2], dtype=dtype),
            torch.randn(shape[1], shape[2], dtype=dtype),
            torch.randn(shape[0], shape[1], dtype=dtype),
        )
        for shape in set(shapes)
    }

    def micro_batch() -> None:
        for shape in shapes:
            inputs_NI, weights_OI, outputs_NO = operands[shape]
            torch.mm(inputs_NI, weights_OI.T)
            torch.mm(outputs_NO, weights_OI)
            torch.mm(outputs_NO.T, inputs_NI)

    number = NUM_MICRO_BATCHES[model]

    def seconds(at_once: int) -> float:
        threads = max(1, num_cores() // at_once)
        with ThreadPoolExecutor(at_once, "", torch.set_num_threads, (threads,)) as pool:
            list(pool.map(lambda _: None, range(at_once)))
            started = time.perf_counter()
            list(pool.map(lambda _: micro_batch(), range(number)))
            return time.perf_counter() - started

    ways = (1, num_cores())
    best = min(ways, key=lambda at_once: min(seconds(at_once) for _ in range(2)))
    talk.ready(kernel=kernel, at_once=best, type=str(dtype).removeprefix("torch."))
    for _ in talk.requests():
        talk.reply(value=number * rows / seconds(best))

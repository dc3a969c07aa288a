"""What SmolLM2 does on this machine: python benchmarks/real.py MODEL_DIR [PART ...]

``shown``: how often what is shown of a search holds an answer, by passages and tokens.
``learning``: a step's arithmetic beside the machine's own matrix products. ``sampling``: turns of
the in-process engine beside transformers' generate, turn by turn. Each pair runs alternately;
medians.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from statistics import fmean, median

import torch
from rich.console import Console

from forage.algorithms.packing import lay_end_to_end
from forage.attention import install
from forage.config.model_config import ModelConfig
from forage.config.rollout_config import EngineConfig
from forage.data.questions import read_questions
from forage.environment.codec import Codec
from forage.environment.observation import build_observation
from forage.hardware import choose_matmul_kernel, matmul_rate, num_cores
from forage.plan.fit_here import choose_at_once
from forage.retrieval.index.index import build_index, open_index
from forage.rollout.engines.torch.stopping import StopTable
from forage.rollout.engines.torch.torch_engine import TorchEngine
from forage.rollout.play.reader import shown_answer
from forage.training.gradients import accumulate
from forage.training.logprobs import token_logprobs
from forage.training.model import load_model, load_tokenizer
from forage.types import Sampling

ROUNDS = 5
NUM_TOKENS, NUM_EPISODES, NUM_NEW = 256, 16, 32
PRINT = Console(soft_wrap=True, highlight=False).print


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def shown(config: ModelConfig) -> None:
    """The share of development questions of which an observation shows an answer."""
    files = resources.files("forage") / "real"
    questions = read_questions(Path(str(files / "dev.jsonl.gz")))
    codec = Codec(load_tokenizer(config))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        corpus.write_bytes(gzip.decompress((files / "corpus.jsonl.gz").read_bytes()))
        for language in ("plain", "en"):
            out = Path(folder) / language
            build_index(corpus, out, language=language, show_progress=False)
            hits = open_index(out).search([question.text for question in questions], 3)
            for topk in (1, 2, 3):
                for most in (200, 256, 320, 400, 512):
                    pairs = [
                        (build_observation(found[:topk], codec, most).token_ids, question)
                        for found, question in zip(hits, questions, strict=True)
                    ]
                    is_shown = [
                        shown_answer(codec.decode(ids), question.golden_answers) is not None
                        for ids, question in pairs
                    ]
                    mean = fmean(len(ids) for ids, _ in pairs)
                    PRINT(
                        f"{language} topk {topk} of {most}: {fmean(is_shown):.3f}, {mean:.0f} long"
                    )


def learning(config: ModelConfig) -> None:
    """Tokens a second of forward and backward, and their share of the matrix rate of all cores."""
    at_once = choose_at_once(config)
    model = load_model(config)
    install(model)
    packed = lay_end_to_end([list(range(1000, 1000 + NUM_TOKENS))])
    wanted = packed.positions_N >= NUM_TOKENS - NUM_NEW

    def loss() -> tuple[torch.Tensor, None]:
        return -token_logprobs(model, packed, wanted, 1.0)[0].sum(), None

    def step() -> None:
        accumulate(model, [loss] * num_cores(), at_once)

    step()
    kind = config.arithmetic or config.dtype
    taken = [(seconds(step), num_cores() * matmul_rate(kind)) for _ in range(ROUNDS)]
    tokens = num_cores() * NUM_TOKENS
    size = model.num_parameters()
    shares = [6 * size * tokens / took / rate for took, rate in taken]
    rate = median(tokens / took for took, _ in taken)
    PRINT(
        f"learning ({kind}, {at_once} at once): {rate:.1f} tokens/s, {median(shares):.2f} of rate"
    )


def sampling(config: ModelConfig) -> None:
    """Sampled tokens a second: the engine's episodes together, and generate one by one."""
    model, plain = load_model(config), load_model(config)
    prompts = [[1000 + n, *range(2000, 2000 + NUM_TOKENS)] for n in range(NUM_EPISODES)]

    async def play() -> None:
        stop = StopTable.of(load_tokenizer(config))
        settings = EngineConfig(num_slots=NUM_EPISODES, tile_rows=8)
        engine = TorchEngine(model, stop, settings, NUM_TOKENS + NUM_NEW + 1)
        turns = [
            engine.generate(ids, Sampling(NUM_NEW, (), (), f"{n}", 0))
            for n, ids in enumerate(prompts)
        ]
        await asyncio.gather(*turns)
        await engine.close()

    def generate() -> None:
        for ids in prompts[:ROUNDS]:
            inputs = torch.tensor([ids])
            plain.generate(  # pyright: ignore[reportCallIssue]  # a mixin's
                inputs, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=True
            )

    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(NUM_EPISODES * NUM_NEW / seconds(lambda: asyncio.run(play())))
        theirs.append(ROUNDS * NUM_NEW / seconds(generate))
    PRINT(f"sampling: engine {median(ours):.1f} tokens/s, generate {median(theirs):.1f} tokens/s")


def main() -> None:
    config = ModelConfig(path=sys.argv[1])
    choose_matmul_kernel()
    rates = [matmul_rate(kind) / 1e9 for kind in ("float32", "bfloat16")]
    PRINT(f"one thread: float32 {rates[0]:.1f} GFLOP/s, bfloat16 {rates[1]:.1f} GFLOP/s")
    parts = {"shown": shown, "learning": learning, "sampling": sampling}
    for name in sys.argv[2:] or parts:
        parts[name](config)


if __name__ == "__main__":
    main()

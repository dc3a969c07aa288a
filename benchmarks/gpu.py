"""Forage's own engine and trainer on one GPU: first whether they are right, then how fast.

    python benchmarks/gpu.py --hardware H100-80GB --compile              # Qwen2.5-1.5B and 3B
    python benchmarks/gpu.py --device cpu --shapes tiny --episodes 8 --contexts 64 --new-tokens 8

For each shape, with random weights, the script compares the log-probabilities of the engine and of
the trainer with float32 on the CPU, and exits with status 1 if they differ too much. It then prints
tokens per second of prefill and of decoding at each context, of the pass for log-probabilities and
of a training step, and the seconds of a publish from the trainer's sender to another process,
bucket by bucket, as weights travel to a server. Decoding is compared with the bound set by memory
bandwidth (weights, keys and values are read once per token), training with the peak of bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from forage.hardware import choose_matmul_kernel, quiet_openmp

quiet_openmp()

import torch  # noqa: E402  # after the OpenMP settings
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from weight_receiver import publishing  # noqa: E402

from forage.algorithms.packing import pack, uncredited  # noqa: E402
from forage.batch import Credited  # noqa: E402
from forage.config.algorithm_config import AlgorithmConfig  # noqa: E402
from forage.config.placement_config import TorchPlacement  # noqa: E402
from forage.config.trainer_config import TrainerConfig  # noqa: E402
from forage.plan.accelerators import ACCELERATORS  # noqa: E402
from forage.rollout.engines.servers.weight_sender import WeightSender  # noqa: E402
from forage.rollout.engines.torch.stopping import StopTable  # noqa: E402
from forage.rollout.engines.torch.torch_engine import TorchEngine  # noqa: E402
from forage.training.compiled import compile_layers  # noqa: E402
from forage.training.local_trainer import LocalTrainer  # noqa: E402
from forage.training.model import shapes_by_name, weights_by_name  # noqa: E402
from forage.types import Completion, Episode, Origin, Question, Sampling, Segment, Status  # noqa: E402

SHAPES = {  # hidden, feed-forward, layers, heads, key-value heads, vocabulary
    "tiny": (64, 128, 2, 4, 2, 512),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151_936),
    "qwen2.5-3b": (2048, 11_008, 36, 16, 2, 151_936),
}
CHECKED_PROMPT, CHECKED_TOKENS = 24, 16
LARGEST, MEAN, OF_HIDDEN = 0.15, 0.05, 1536
"""How far log-probabilities in bfloat16 may be from float32 on the CPU at this hidden size.

Between two and three times the deviation of a correct engine and a correct trainer on an H100:
0.054 and 0.021 (scale.md). Logits of random weights, and so their rounding errors, grow with the
square root of the hidden size. At the tiny shape, where a mean of 0.01 is allowed, the
log-probabilities of the next position are off by 0.19 in the mean, and those of a context without
its first token by 0.014.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The device, and the peak rates of its memory and arithmetic; None if unknown."""

    device: torch.device
    terabytes_per_s: float | None
    teraflops: float | None


def new_model(shape: str, device: torch.device, is_compiled: bool) -> PreTrainedModel:
    hidden, feed_forward, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = Qwen2ForCausalLM(config).bfloat16().eval()
    if is_compiled:
        compile_layers(model)
    return model


def seconds_of(work: Callable[[], object], machine: Machine) -> float:
    """Seconds of the second of two runs; the first one warms up."""

    def timed() -> float:
        started = time.monotonic()
        work()
        if machine.device.type == "cuda":
            torch.cuda.synchronize(machine.device)
        return time.monotonic() - started

    timed()
    return timed()


def prompts(number: int, length: int, vocabulary: int) -> list[list[int]]:
    """Different prompts, so that none is computed once for several."""
    chance = random.Random(length)
    return [[chance.randrange(vocabulary) for _ in range(length)] for _ in range(number)]


def ask(key: str, num_tokens: int) -> Sampling:
    return Sampling(num_tokens, (), (), key, 7, 1.0)


def episode_of(prompt: Sequence[int], sampled: Segment) -> Episode:
    segments = (Segment(Origin.PROMPT, tuple(prompt)), sampled)
    return Episode(Question("q", "?", ("a",), "random"), 0, segments, (), Status.ANSWERED)


def joined(first: Completion, rest: Completion) -> Segment:
    return Segment(
        Origin.SAMPLED,
        first.token_ids_T + rest.token_ids_T,
        first.logprobs_T + rest.logprobs_T,
        first.versions_T + rest.versions_T,
    )


def new_engine(model: PreTrainedModel, num_slots: int, max_tokens: int) -> TorchEngine:
    tile_rows = min(32, num_slots)
    settings = TorchPlacement(num_slots=num_slots, tile_rows=tile_rows, max_draft_tokens=0)
    vocabulary = model.config.vocab_size
    return TorchEngine(model, StopTable([b"?"] * vocabulary), settings, max_tokens)


def new_trainer(model: PreTrainedModel) -> LocalTrainer:
    settings = TrainerConfig(max_tokens_per_micro_batch=micro_batch_tokens(model))
    return LocalTrainer(model, settings, AlgorithmConfig(decoupled=True), 1.0)


def micro_batch_tokens(model: PreTrainedModel) -> int:
    """16,384 for a model of 1.5 billion parameters, half of it for one twice as large."""
    return min(16_384, 2 ** int(math.log2(16_384 * 1.6e9 / model.num_parameters())))


async def play(
    engine: TorchEngine, asked: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[Segment], float, float]:
    """What was sampled, the seconds for the first token of each, and those for all the others."""
    started = time.monotonic()
    firsts = await asyncio.gather(
        *(engine.generate(prompt, ask(f"{i}", 1)) for i, prompt in enumerate(asked))
    )
    begun = time.monotonic()
    begun_with = [[*p, *c.token_ids_T] for p, c in zip(asked, firsts, strict=True)]
    rests = await asyncio.gather(
        *(engine.generate(p, ask(f"{i}", num_tokens - 1)) for i, p in enumerate(begun_with))
    )
    ended = time.monotonic()
    for number in range(len(asked)):
        engine.release(f"{number}")
    sampled = [joined(*pair) for pair in zip(firsts, rests, strict=True)]
    return sampled, begun - started, ended - begun


async def check(model: PreTrainedModel) -> None:
    """Compares engine and trainer with float32 on the CPU; exits if one deviates too much."""
    (prompt,) = prompts(1, CHECKED_PROMPT, model.config.vocab_size)
    engine = new_engine(model, 8, CHECKED_PROMPT + CHECKED_TOKENS)
    ((sampled,), _, _) = await play(engine, [prompt], CHECKED_TOKENS)
    await engine.close()
    credited = uncredited(episode_of(prompt, sampled))
    ((filled,),), _ = new_trainer(model).prepare([[credited]])
    plain = Qwen2ForCausalLM(Qwen2Config(**model.config.to_dict())).float().eval()
    plain.set_attn_implementation("eager")
    plain.load_state_dict({name: w.float().cpu() for name, w in model.state_dict().items()})
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *sampled.token_ids_T]])
        logprobs_TV = torch.log_softmax(plain(ids).logits[0], -1)[len(prompt) - 1 : -1]
    expected = logprobs_TV.gather(1, torch.tensor(sampled.token_ids_T)[:, None])[:, 0]
    scale = math.sqrt(model.config.hidden_size / OF_HIDDEN)
    largest, mean = LARGEST * scale, MEAN * scale
    for name, found in (
        ("engine", torch.tensor(sampled.logprobs_T)),
        ("trainer", filled.old_logprobs_M.float().cpu()),
    ):
        differing = (found - expected).abs()
        told = f"largest difference {differing.max():.2e}, mean {differing.mean():.2e}"
        print(f"  {name} against float32 on the CPU: {told}", flush=True)
        if not (differing.max() <= largest and differing.mean() <= mean):  # NaN fails as well
            sys.exit(f"the {name} is wrong: it may be off by {largest:.1e}, {mean:.1e} in the mean")


async def sampling(
    model: PreTrainedModel, machine: Machine, context: int, number: int, new_tokens: int
) -> list[Credited]:
    """Prints the speed of prefill and decoding; returns the episodes."""
    everything = prompts(2 * number, context - new_tokens, model.config.vocab_size)
    warming_up, asked = everything[:number], everything[number:]
    engine = new_engine(model, number, context)
    await play(engine, warming_up, new_tokens)
    sampled, prefill_s, decode_s = await play(engine, asked, new_tokens)
    await engine.close()
    prefill = sum(map(len, asked)) / prefill_s
    decode = number * (new_tokens - 1) / max(decode_s, 1e-9)
    told = f"  context {context}: prefill {prefill:,.0f} tokens/s, decoding {decode:,.0f} tokens/s"
    if machine.terabytes_per_s is not None:
        floor = machine.terabytes_per_s * 1e12 / bytes_a_token(model, context, number)
        told += f", {decode / floor:.2f} of the bound ({floor:,.0f})"
    print(told, flush=True)
    return [uncredited(episode_of(p, c)) for p, c in zip(asked, sampled, strict=True)]


def bytes_a_token(model: PreTrainedModel, context: int, number: int) -> float:
    """Bytes that must be read per token: its share of the weights, and its keys and values."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    cached = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * context
    return 2 * model.num_parameters() / number + cached


def learning(model: PreTrainedModel, machine: Machine, played: list[Credited]) -> None:
    """Prints the speed of the pass for log-probabilities and of a training step."""
    num_tokens = sum(each.episode.num_tokens for each in played)
    trainer = new_trainer(model)
    seconds = seconds_of(lambda: trainer.prepare([played]), machine)
    _tell("log-probabilities", num_tokens, seconds, 2 * model.num_parameters(), machine)
    batch = pack(played, micro_batch_tokens(model))
    seconds = seconds_of(lambda: trainer.step(batch, nullcontext()), machine)
    _tell("training step", num_tokens, seconds, 6 * model.num_parameters(), machine)


def publish(model: PreTrainedModel, machine: Machine) -> None:
    """Publishes all weights to another process, on another GPU if there is one; prints the time."""
    there = torch.device("cpu")
    if machine.device.type == "cuda" and torch.cuda.device_count() > 1:
        there = torch.device("cuda", 0 if machine.device.index else 1)
    weights, shapes = partial(weights_by_name, model), partial(shapes_by_name, model)
    # Only the model's own device has an index, which a thread that sends by NCCL needs.
    with publishing(WeightSender(weights, model.device, shapes), there) as (send, way):
        seconds, num_bytes = seconds_of(send, machine), send()
    print(f"  publish by {way}: {seconds:.3f} s for {num_bytes / 1e9:.2f} GB", flush=True)


def _tell(what: str, num_tokens: int, seconds: float, flops: float, machine: Machine) -> None:
    speed = num_tokens / seconds
    told = f"  {what}: {speed:,.0f} tokens/s"
    if machine.teraflops is not None:
        told += f", {speed * flops / machine.teraflops / 1e12:.2f} of the peak"
    print(told, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine and the trainer on one GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hardware", choices=sorted(ACCELERATORS), help="for the bounds")
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5-1.5b", "qwen2.5-3b"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[500, 1500, 4000])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--learnt", type=int, default=32, help="episodes of each context")
    parser.add_argument("--compile", action="store_true", help="compile layers like model.compile")
    args = parser.parse_args()
    choose_matmul_kernel()
    known = ACCELERATORS.get(args.hardware)
    machine = Machine(
        torch.device(args.device),
        known.terabytes_per_s if known else None,
        known.teraflops if known else None,
    )
    for shape in args.shapes:
        model = new_model(shape, machine.device, args.compile)
        print(f"{shape}: {model.num_parameters() / 1e6:,.1f} million parameters, bfloat16")
        asyncio.run(check(model))
        played: list[Credited] = []
        for context in args.contexts:
            work = sampling(model, machine, context, args.episodes, args.new_tokens)
            played = [*played, *asyncio.run(work)[: args.learnt]]
        learning(model, machine, played)
        publish(model, machine)


if __name__ == "__main__":
    main()

"""How long a run would take on named hardware: arithmetic over peaks and stated shares of them.

Decoding reads the weights and the keys and values of all episodes once a token, so its floor is
bytes over bandwidth. A pass multiplies each weight with each token, 2 operations
(https://arxiv.org/abs/2001.08361, section 2.1), and in each layer each query with the keys before
it, and what comes of that with their values: 4 x heads x head size x keys
(https://arxiv.org/abs/2204.02311, appendix B), of which causal attention needs half
(https://arxiv.org/abs/2307.08691, section 4.1). Learning takes three passes, one more where
activations are computed again, and one for each that only scores (old policy, reference). The peak
is that of the type in which is multiplied. Each share below is an assumption that the plan prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from forage.config.run_config import RunConfig
from forage.plan.accelerators import Hardware
from forage.plan.engine_memory import sampling_dtype
from forage.plan.memory_parts import learnt_numbers
from forage.training.model_size import BYTES, ModelSize

LENGTH_SHARE = 0.4
"""The length of a usual episode, of ``environment.max_tokens``."""
SAMPLED_SHARE = 0.4
"""The sampled tokens of an episode; the rest is its prompt and what it was shown."""
DECODE_SHARE = 0.5
"""The speed of decoding, of what the bandwidth of the memory allows."""
LEARN_SHARE = 0.3
"""The arithmetic of learning and of prefill, of the GPU's peak."""
GPU_BYTES_PER_S = 10e9
"""The speed at which weights reach servers with GPUs of their own, by NCCL: what others publish
lies between 3 GB/s (verl, 7B in 5.5 s) and 28 GB/s (TRL, 32B in 2.3 s)."""
HOST_BYTES_PER_S = 0.25e9
"""And through host memory or files: 1.98 GB in 7.2 and 8.2 s, two ranks over gloo on two cores
(benchmarks/scale.md). It has not been measured on more cores, which do more."""
PUBLISHED_RATIOS = {"verl, 8 x H20": 0.36, "RLinf, 8 x H100": 1.22, "SkyRL, 8 x H100": 3.5}
"""Published steps of 3B over sampling and learning here: 185 s for 2,560 episodes (27 h less six
evaluations of 6,000 s, over 331 steps), 86 s for 2,048, 305 s for 2,560. Above 1 most of it is
search and orchestration; below it episodes are shorter, and an H20 reaches more of its peak."""
TAIL = 1.3
"""The longer wait for the last episodes of a step, when few are left to decode."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of one step by phase, and hours of the run."""

    sampling_s: float
    learning_s: float
    publishing_s: float
    overlaps: bool
    num_steps: int
    evaluation_hours: float

    @property
    def step_s(self) -> float:
        """One step; with staleness, sampling and learning go on at the same time."""
        phases = (self.sampling_s, self.learning_s)
        return (max(phases) if self.overlaps else sum(phases)) + self.publishing_s

    @property
    def publishing_hours(self) -> float:
        return self.num_steps * self.publishing_s / 3600

    @property
    def hours(self) -> float:
        return self.num_steps * self.step_s / 3600 + self.evaluation_hours


def estimate_duration(
    config: RunConfig, model: ModelSize, num_episodes: int, hardware: Hardware
) -> Duration:
    """The time of a run whose steps play ``num_episodes`` episodes each."""
    tokens = num_episodes * num_contexts(config) * LENGTH_SHARE * config.environment.max_tokens
    evaluation = config.evaluation
    num_times = config.trainer.num_steps // evaluation.every if evaluation.every else 0
    on_the_way = evaluation.num_training_questions or evaluation.num_questions
    hours = 0.0
    for times, num_questions in (
        (num_times, on_the_way),
        (int(evaluation.at_end), evaluation.num_questions),
    ):
        num_played = (num_questions or 0) * evaluation.num_samples * len(evaluation.arms)
        if times and num_played:
            hours += times * sampling_seconds(config, model, num_played, hardware) / 3600
    placement = config.placement
    peak = (placement.num_ranks or 1) * hardware.gpu.flops_in(placement.arithmetic_of(config.model))
    return Duration(
        sampling_s=sampling_seconds(config, model, num_episodes, hardware),
        learning_s=learning_operations(config, model, tokens) / (peak * LEARN_SHARE),
        publishing_s=published_bytes(config, model) / publishing_speed(config),
        overlaps=config.rollout.max_staleness > 0,
        num_steps=config.trainer.num_steps,
        evaluation_hours=hours,
    )


def sampling_seconds(
    config: RunConfig, model: ModelSize, num_episodes: int, hardware: Hardware
) -> float:
    """The time to play so many episodes: decoding, and the prefill of what is not sampled."""
    tensor_parallel = config.placement.engine.tensor_parallel
    num_engines, dtype = config.placement.num_engines, sampling_dtype(config)
    length = LENGTH_SHARE * config.environment.max_tokens
    at_once = ceil(min(_num_in_flight(config), num_episodes) / num_engines)
    num_copies = max(1, tensor_parallel / max(1, model.num_kv_heads))  # each GPU has one or more
    held = num_copies * at_once * (length / 2) * model.kv_numbers_per_token * BYTES[dtype]
    read = model.num_multiplied * BYTES[dtype] + held
    bandwidth = tensor_parallel * hardware.gpu.terabytes_per_s * 1e12 * DECODE_SHARE
    tokens_per_s = num_engines * at_once / (read / bandwidth)
    decoding = num_episodes * length * SAMPLED_SHARE / tokens_per_s
    prefilled = num_episodes * num_contexts(config) * length * (1 - SAMPLED_SHARE)
    arithmetic = num_engines * tensor_parallel * hardware.gpu.flops_in(dtype) * LEARN_SHARE
    return TAIL * decoding + pass_operations(model, length) * prefilled / arithmetic


def _num_in_flight(config: RunConfig) -> int:
    """Episodes that decode at the same time, in all engines together."""
    asked = config.rollout.max_concurrent_episodes
    is_served = config.placement.has_server
    return asked if is_served else min(asked, config.rollout.engine.num_slots)


def published_bytes(config: RunConfig, model: ModelSize) -> int:
    """What travels after a step: the weights in the servers' type, or adapters alone.

    Files have the trainer's.
    """
    placement = config.placement
    engine = placement.engine
    if engine.kind == "torch" and placement.num_ranks is None:
        return 0  # the engine samples with the trainer's own
    if engine.kind == "vllm" and engine.transfer == "adapters":
        learnt = learnt_numbers(config, model)
        return learnt.count * learnt.size
    is_grouped = engine.kind != "torch" and engine.transfer == "group"
    dtype = sampling_dtype(config) if is_grouped else config.model.dtype
    return model.num_parameters * BYTES[dtype]


def publishing_speed(config: RunConfig) -> float:
    """Bytes a second: NCCL joins no two processes on one GPU, so what shares takes another way."""
    engine = config.placement.engine
    is_apart = config.placement.own_gpus > 0 or (bool(engine.urls) and not engine.offload)
    is_grouped = engine.kind != "torch" and engine.transfer == "group"
    return GPU_BYTES_PER_S if is_apart and is_grouped else HOST_BYTES_PER_S


def num_contexts(config: RunConfig) -> int:
    """The most contexts of an episode: one begins with each result that archives another."""
    kept = config.environment.keep_observations
    return 1 if kept is None else 1 + config.environment.max_turns - kept


def pass_operations(model: ModelSize, length: float) -> float:
    """Operations a token of a forward pass over sequences of ``length`` tokens.

    A query has half of them before it: ten thousand tokens add a quarter for Qwen2.5-3B.
    """
    attention = 4 * model.num_heads * model.head_dim * length / 2
    return 2 * model.num_multiplied + model.num_layers * attention


def learning_operations(config: RunConfig, model: ModelSize, num_tokens: float) -> float:
    """Operations of one step's learning over ``num_tokens`` tokens of episodes."""
    algorithm = config.algorithm
    length = LENGTH_SHARE * config.environment.max_tokens
    a_pass = pass_operations(model, length) * num_tokens
    a_lesson = (4 if config.model.gradient_checkpointing else 3) * a_pass
    num_lessons = config.trainer.num_epochs * (2 if algorithm.critic is not None else 1)
    num_scorings = algorithm.needs_recomputed_logprobs + (algorithm.kl is not None)
    num_scorings += algorithm.critic is not None
    num_scorings += algorithm.advantage.reads_energies
    if (gain := algorithm.information_gain) is not None:
        # Each call is asked about behind a part of the episode, half of it on average.
        num_scorings += (1 + gain.num_others) * config.environment.max_turns / 2
    return num_lessons * a_lesson + num_scorings * a_pass


def assumptions(config: RunConfig) -> Iterator[str]:
    """What the hours rest on, a sentence each."""
    length = round(LENGTH_SHARE * config.environment.max_tokens)
    num = num_contexts(config)
    many = f"; it has {num} contexts of this length, and each is learnt" if num > 1 else ""
    yield (
        f"an episode has {length:,} tokens ({LENGTH_SHARE:.0%} of environment.max_tokens), "
        f"{SAMPLED_SHARE:.0%} of them sampled{many}"
    )
    placement = config.placement
    yield (
        f"decoding at {DECODE_SHARE:.0%} of what the memory's bandwidth allows, in "
        f"{sampling_dtype(config)}; learning at {LEARN_SHARE:.0%} of the GPU's peak in "
        f"{placement.arithmetic_of(config.model)}; waiting for the last episodes of a step adds "
        f"{TAIL - 1:.0%}"
    )
    speed = publishing_speed(config)
    how = "from GPU to GPU" if speed == GPU_BYTES_PER_S else "through host memory or files"
    measured = "" if speed == GPU_BYTES_PER_S else ", as was measured on two cores"
    yield (
        f"weights reach the engines {how} at {speed / 1e9:g} GB/s{measured}; a faster way "
        "shortens the hours of publishing in proportion"
    )
    ratios = ", ".join(f"{ratio:g} ({who})" for who, ratio in PUBLISHED_RATIOS.items())
    yield (
        "searches are answered while other episodes are decoded; published steps of 3B took so "
        f"many times what sampling and learning take here: {ratios}"
    )
    evaluation = config.evaluation
    is_evaluated = evaluation.at_end or (evaluation.every and not evaluation.num_training_questions)
    if is_evaluated and not evaluation.num_questions:
        yield "evaluations are left out: the number of test questions is not set"

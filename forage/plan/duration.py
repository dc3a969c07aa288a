"""How long a run would take on named hardware: arithmetic over peaks and stated shares of them.

Decoding reads the weights and the keys and values of all episodes once a token, so its floor is
bytes over bandwidth. Learning multiplies each weight with each token: 6 operations, 2 more where
activations are computed again, 2 for each pass that only scores (old policy, reference).
https://arxiv.org/abs/2001.08361, section 2.1, counts so. Nothing is measured; each share below is
an assumption that the plan prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from forage.config.run_config import RunConfig
from forage.plan.accelerators import Hardware
from forage.plan.memory import SERVER_BYTES
from forage.plan.models import ModelSize

LENGTH_SHARE = 0.4
"""The length of a usual episode, of ``environment.max_tokens``."""
SAMPLED_SHARE = 0.4
"""The sampled tokens of an episode; the rest is its prompt and what it was shown."""
DECODE_SHARE = 0.5
"""The speed of decoding, of what the bandwidth of the memory allows."""
LEARN_SHARE = 0.3
"""The arithmetic of learning and of prefill, of the GPU's peak."""
PUBLISH_BYTES_PER_S = 10e9
"""The speed at which new weights reach the engines."""
PUBLISHED_RATIOS = (1.26, 3.6)
"""Published steps of 3B on 8 x H100, over this arithmetic: RLinf's (86 s for 2,048 episodes) and
SkyRL's (305 s for 2,560); most of the difference is search and orchestration."""
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
    return Duration(
        sampling_s=sampling_seconds(config, model, num_episodes, hardware),
        learning_s=learning_operations(config, model, tokens)
        / ((config.placement.num_ranks or 1) * hardware.gpu.teraflops * 1e12 * LEARN_SHARE),
        publishing_s=model.num_parameters * SERVER_BYTES / PUBLISH_BYTES_PER_S,
        overlaps=config.rollout.max_staleness > 0,
        num_steps=config.trainer.num_steps,
        evaluation_hours=hours,
    )


def sampling_seconds(
    config: RunConfig, model: ModelSize, num_episodes: int, hardware: Hardware
) -> float:
    """The time to play so many episodes: decoding, and the prefill of what is not sampled."""
    tensor_parallel = config.placement.engine.tensor_parallel
    num_gpus = config.placement.own_gpus or hardware.num_gpus
    num_engines = max(num_gpus // tensor_parallel, 1)
    length = LENGTH_SHARE * config.environment.max_tokens
    at_once = ceil(min(config.rollout.max_concurrent_episodes, num_episodes) / num_engines)
    held = at_once * (length / 2) * model.kv_numbers_per_token * SERVER_BYTES
    read = model.num_parameters * SERVER_BYTES + held
    bandwidth = tensor_parallel * hardware.gpu.terabytes_per_s * 1e12 * DECODE_SHARE
    tokens_per_s = num_engines * at_once / (read / bandwidth)
    decoding = num_episodes * length * SAMPLED_SHARE / tokens_per_s
    prefilled = num_episodes * num_contexts(config) * length * (1 - SAMPLED_SHARE)
    arithmetic = num_gpus * hardware.gpu.teraflops * 1e12 * LEARN_SHARE
    return TAIL * decoding + 2 * model.num_parameters * prefilled / arithmetic


def num_contexts(config: RunConfig) -> int:
    """The most contexts of an episode: one begins with each result that archives another."""
    kept = config.environment.keep_observations
    return 1 if kept is None else 1 + config.environment.max_turns - kept


def learning_operations(config: RunConfig, model: ModelSize, num_tokens: float) -> float:
    """Operations of one step's learning over ``num_tokens`` tokens of episodes."""
    algorithm = config.algorithm
    a_pass = 2 * model.num_parameters * num_tokens
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
    yield (
        f"an episode has {length:,} tokens ({LENGTH_SHARE:.0%} of environment.max_tokens), "
        f"{SAMPLED_SHARE:.0%} of them sampled"
    )
    yield (
        f"decoding at {DECODE_SHARE:.0%} of what the memory's bandwidth allows, learning at "
        f"{LEARN_SHARE:.0%} of the GPU's peak, weights to the engines at "
        f"{PUBLISH_BYTES_PER_S / 1e9:g} GB/s; waiting for the last episodes of a step adds "
        f"{TAIL - 1:.0%}"
    )
    least, most = PUBLISHED_RATIOS
    yield (
        "searches are answered while other episodes are decoded; published steps of 3B on 8 x "
        f"H100 took {least:g} to {most:g} times this arithmetic"
    )
    evaluation = config.evaluation
    is_evaluated = evaluation.at_end or (evaluation.every and not evaluation.num_training_questions)
    if is_evaluated and not evaluation.num_questions:
        yield "evaluations are left out: the number of test questions is not set"

"""The trainer of a run: in this process, or as ranks that hold the weights in parts.

The loop holds ``TrainerRanks`` as it would hold a ``Trainer``. Each rank is a process with a
``Trainer`` that has cut its models; every call goes to all ranks with the whole step, and rank 0
answers. The driver has a whole copy of the weights, with which its engine samples, and brings it
up to date after a step, while the ranks wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forage import attention
from forage.algorithms.packing import pack_mini_batches
from forage.batch import Batch, Weighed
from forage.config.placement_config import TrainerPlacement
from forage.config.run_config import RunConfig
from forage.environment.codec import Codec
from forage.hardware import choose_matmul_kernel
from forage.training.critic import Critic
from forage.training.golden_beliefs import GoldenBeliefs
from forage.training.model import load_critic_base, load_policy, load_reference, load_tokenizer
from forage.training.rank_processes import RankProcesses, StartRanks
from forage.training.sequence_cost import cost_of
from forage.training.sharding import gathered, load_learnt
from forage.training.trainer import Progress, Trainer

LOG = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
"""Weights travel in buckets of this size; the driver holds one of them beside its copy."""


def open_trainer(config: RunConfig, start_ranks: StartRanks = RankProcesses) -> AnyTrainer:
    """The trainer that ``placement`` asks for: this process, or ranks; raises ``UserError``."""
    choose_matmul_kernel()
    model = config.model
    if config.placement.num_ranks is None:
        return build_trainer(load_policy(model, config.seed), config)
    if config.placement.has_server:  # the copy here is only read: the GPUs are for the others
        model = model.model_copy(update={"device": "cpu"})
    return TrainerRanks(load_policy(model, config.seed), config, start_ranks)


def build_trainer(
    model: PreTrainedModel, config: RunConfig, placement: TrainerPlacement | None = None
) -> Trainer:
    """The trainer of a run, with the reference and the critic that its algorithm needs.

    ``placement`` makes it a rank, whose models come whole into host memory and part by part onto
    its device. Raises ``UserError`` if one of their models cannot be loaded.
    """
    algorithm, device_type = config.algorithm, torch.device(config.model.device).type
    if placement is not None:
        config = _in_host_memory(config)
    reference, critic = None, None
    if algorithm.kl is not None:
        reference = load_reference(model, config.model, algorithm.kl.reference)
    if algorithm.critic is not None:
        base = load_critic_base(model, config.model, algorithm.critic.path, config.seed)
        critic = Critic(base)
    if algorithm.train_observations:
        LOG.warning(
            "algorithm.train_observations is on: the text of search results is trained as if the "
            "policy had written it. This is an ablation, to see what masking is good for; leave "
            "it off to get a policy that is worth having"
        )
    golden = None
    if algorithm.information_gain is not None:
        golden = GoldenBeliefs(Codec(load_tokenizer(config.model)), algorithm.information_gain)
    beside = (reference, critic, placement, golden, device_type)
    return Trainer(model, config.trainer, algorithm, config.rollout.temperature, *beside)


def _in_host_memory(config: RunConfig) -> RunConfig:
    """The run with its models on the CPU: a GPU that has room for parts may have none for all."""
    model = config.model.model_copy(update={"device": "cpu"})
    return config.model_copy(update={"model": model})


class TrainerRanks:
    """Holds a copy of the policy's weights, and the processes that improve them."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, start_ranks: StartRanks) -> None:
        """Start the ranks; raises ``UserError`` where they cannot load or cut their models."""
        attention.install(model)
        self.model = model
        self.has_critic = config.algorithm.critic is not None
        self.rate_factor = 1.0
        """The factor by which rollbacks have lowered the learning rate."""
        self._config = config
        algorithm = config.algorithm
        self._looks_ahead = (
            algorithm.needs_recomputed_logprobs
            or algorithm.kl is not None
            or algorithm.critic is not None
            or algorithm.advantage.reads_energies
            or algorithm.information_gain is not None
        )
        placement = config.placement
        assert placement.num_ranks is not None, "one process needs no ranks"
        trainer = placement.trainer
        self._num_data_ranks = placement.num_ranks // (
            trainer.sequence_parallel * trainer.tensor_parallel
        )
        self._ranks = start_ranks(
            placement.num_ranks,
            partial(TrainerRank, config),
            torch.device(config.model.device).type,
            trainer.timeout_s,
        )
        self._see_progress()

    def prepare(
        self, weighed_P: Sequence[Sequence[Weighed]]
    ) -> tuple[list[list[Weighed]], dict[str, float]]:
        """As ``Trainer.prepare``."""
        if not self._looks_ahead:
            return [list(weighed) for weighed in weighed_P], {}
        return self._ranks.call("prepare", weighed_P)

    def pack(self, weighed_P: Sequence[Sequence[Weighed]]) -> tuple[list[Batch], dict[str, float]]:
        """As ``Trainer.pack``; micro-batches in multiples of the ranks that take them."""
        metrics: dict[str, float] = {}
        if self._config.algorithm.train_observations:
            weighed_P, metrics = self._ranks.call("unmask_observations", weighed_P)
        sizes = self._config.trainer
        batches = pack_mini_batches(
            weighed_P,
            self._config.algorithm.picked,
            sizes.num_mini_batches,
            sizes.max_tokens_per_micro_batch,
            cost_of(self.model),
            self._num_data_ranks,
        )
        return batches, metrics

    def learn(
        self, batches: Sequence[Batch], changing: AbstractContextManager[object]
    ) -> dict[str, float]:
        """As ``Trainer.learn``; the driver's copy changes once, at the end."""
        metrics = self._ranks.call("learn", batches, self.rate_factor)
        if isinstance(metrics, FloatingPointError):
            raise metrics
        with changing:
            self._copy_weights()
        self._see_progress()
        return metrics

    def progress(self) -> Progress:
        """As ``Trainer.progress``."""
        return self._ranks.call("progress")

    def write_states(self, folder: Path) -> None:
        """As ``Trainer.write_states``; each rank writes a file."""
        self._ranks.call("write_states", folder)

    def states_writer(self, folder: Path) -> Callable[[], None]:
        """``write_states`` at once, and nothing for later: what ranks do, they do together."""
        self.write_states(folder)
        return lambda: None

    def load_states(self, folder: Path, progress: Progress) -> None:
        """As ``Trainer.load_states``; the ranks also take over the copy's weights."""
        self._ranks.call("load_states", folder, progress)
        weights = {name: w for name, w in self.model.named_parameters() if w.requires_grad}
        self._ranks.call("load_weights", {name: w.detach().cpu() for name, w in weights.items()})
        self._see_progress()

    def critic_weights(self) -> dict[str, Tensor]:
        """As ``Trainer.critic_weights``."""
        return self._ranks.call("critic_weights")

    def load_critic(self, weights: Mapping[str, Tensor]) -> None:
        """As ``Trainer.load_critic``."""
        self._ranks.call("load_critic", weights)

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _see_progress(self) -> None:
        progress = self.progress()
        self.version = int(progress["version"])
        self.kl_coefficient = progress["kl_coefficient"]

    def _copy_weights(self) -> None:
        """Bring the driver's copy up to date, a bucket at a time."""
        mine = dict(self.model.named_parameters())
        self._ranks.call("begin_gathering")
        while bucket := self._ranks.call("next_bucket", BUCKET_BYTES):
            for name, weight in bucket:
                mine[name].data.copy_(weight)


class TrainerRank:
    """One rank: a trainer over its part of the weights. The ranks' methods are called together."""

    def __init__(self, config: RunConfig) -> None:
        """Load every model and cut it; raises ``UserError``."""
        choose_matmul_kernel()
        policy = load_policy(_in_host_memory(config).model, config.seed)
        trainer = self._trainer = build_trainer(policy, config, config.placement.learning)
        self.prepare, self.unmask_observations = trainer.prepare, trainer.unmask_observations
        self.progress = trainer.progress
        self.write_states, self.load_states = trainer.write_states, trainer.load_states
        self.critic_weights, self.load_critic = trainer.critic_weights, trainer.load_critic
        self._gathered: Iterator[tuple[str, Tensor]] = iter(())
        self._takes_turns = config.placement.engine.offload
        self._give_back()

    def learn(
        self, batches: Sequence[Batch], rate_factor: float
    ) -> dict[str, float] | FloatingPointError:
        """As ``Trainer.learn``; a run that diverged is told, not raised, which would end the ranks.

        All of them see the same norm, and they are needed where the run goes back.
        """
        self._trainer.rate_factor = rate_factor
        try:
            return self._trainer.learn(batches, nullcontext())
        except FloatingPointError as error:
            return error

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over whole weights of the policy."""
        load_learnt(self._trainer.model, weights)

    def begin_gathering(self) -> None:
        """The weights that are learnt will be asked for, from the first."""
        self._gathered = gathered(self._trainer.model)

    def next_bucket(self, num_bytes: int) -> list[tuple[str, Tensor]]:
        """The next weights, whole, in at least ``num_bytes`` if there are as many; then none."""
        bucket: list[tuple[str, Tensor]] = []
        for name, weight in self._gathered:
            bucket.append((name, weight.cpu()))
            num_bytes -= weight.nbytes
            if num_bytes <= 0:
                break
        if not bucket:
            self._give_back()
        return bucket

    def _give_back(self) -> None:
        """Leave to a server beside it what torch keeps of a GPU's memory for later."""
        if self._takes_turns:
            torch.cuda.empty_cache()  # nothing is kept of a CPU's


AnyTrainer = Trainer | TrainerRanks
"""What the loop holds."""

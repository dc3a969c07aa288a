"""The trainer of a run: in this process, or as ranks that hold the weights in parts.

The loop holds ``TrainerRanks`` as it would hold a ``Trainer``. Each rank is a process with a
``Trainer`` that has cut its models; every call goes to all ranks with the whole step, and rank 0
answers. Ranks read, write and send the weights themselves. The driver has a copy of them only
where its own engine samples with it, and brings it up to date after a step, while the ranks wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

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
from forage.training.saved_weights import restore_model
from forage.training.sequence_cost import cost_of
from forage.training.sharding import gathered
from forage.training.skeleton import without_weights
from forage.training.trainer import Progress, Trainer

LOG = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
"""Weights travel to the driver's copy in buckets of this size, of which it holds one beside it."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 2.0
"""Pauses between questions to ranks whether they have written."""


def open_trainer(config: RunConfig, start_ranks: StartRanks = RankProcesses) -> AnyTrainer:
    """The trainer that ``placement`` asks for: this process, or ranks; raises ``UserError``."""
    choose_matmul_kernel()
    model = config.model
    if config.placement.num_ranks is None:
        return build_trainer(load_policy(model, config.seed), config)
    if config.placement.has_server:  # nothing computes with the driver's model: it needs no weights
        model = model.model_copy(update={"device": "cpu"})
        policy = without_weights(load_policy(model, config.seed, in_parts=True))
    else:
        policy = load_policy(model, config.seed)
    return TrainerRanks(policy, config, start_ranks)


def build_trainer(
    model: PreTrainedModel, config: RunConfig, placement: TrainerPlacement | None = None
) -> Trainer:
    """The trainer of a run, with the reference and the critic that its algorithm needs.

    ``placement`` makes it a rank, whose models are read part by part and come onto its device so.
    Raises ``UserError`` if one of their models cannot be loaded.
    """
    algorithm, device_type = config.algorithm, torch.device(config.model.device).type
    in_parts = placement is not None
    if in_parts:
        config = _in_host_memory(config)
    reference, critic = None, None
    if algorithm.kl is not None:
        reference = load_reference(model, config.model, algorithm.kl.reference, in_parts)
    if algorithm.critic is not None:
        path = algorithm.critic.path
        base = load_critic_base(model, config.model, path, config.seed, in_parts)
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
    """The processes that improve the policy, as one trainer; any thread may call it."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, start_ranks: StartRanks) -> None:
        """Start the ranks; raises ``UserError`` where they cannot load or cut their models."""
        attention.install(model)
        self.model = model
        """A copy for the engine in this process, or the modules without weights."""
        self.rate_factor = 1.0
        """The factor by which rollbacks have lowered the learning rate."""
        self._config = config
        self._has_copy = not config.placement.has_server
        self._lock = threading.Lock()
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
        return self._call("prepare", weighed_P)

    def pack(self, weighed_P: Sequence[Sequence[Weighed]]) -> tuple[list[Batch], dict[str, float]]:
        """As ``Trainer.pack``; micro-batches in multiples of the ranks that take them."""
        metrics: dict[str, float] = {}
        if self._config.algorithm.train_observations:
            weighed_P, metrics = self._call("unmask_observations", weighed_P)
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
        """As ``Trainer.learn``; the driver's copy changes once, at the end.

        Without a copy the ranks' own weights are those that are published: from the first change
        on they are on their way to the servers.
        """
        with nullcontext() if self._has_copy else changing:
            metrics = self._call("learn", batches, self.rate_factor)
        if isinstance(metrics, FloatingPointError):
            raise metrics
        if self._has_copy:
            with changing:
                self._copy_weights()
        self._see_progress()
        return metrics

    def progress(self) -> Progress:
        """As ``Trainer.progress``."""
        return self._call("progress")

    def writer(self, folder: Path, is_copied: bool) -> Callable[[], None]:
        """As ``Trainer.writer``: each rank has begun to write, and this waits for all of them."""
        self._call("begin_writing", folder, is_copied)
        return self._wait_for_writing

    def _wait_for_writing(self) -> None:
        """The ranks learn meanwhile, and are asked between their calls."""
        pause_s = _FIRST_LOOK_S
        while not (ended := self._call("has_written")):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        if isinstance(ended, OSError):
            raise ended

    def load(self, checkpoint: Path, progress: Progress) -> None:
        """As ``Trainer.load``."""
        if self._has_copy:
            restore_model(self.model, checkpoint)
        self._call("load", checkpoint, progress)
        self._see_progress()

    def write_merged(self, folder: Path) -> None:
        """As ``Trainer.write_merged``; each rank writes some of the files."""
        self._call_to_write("write_merged", folder)

    def write_learnt(self, folder: Path) -> None:
        """As ``Trainer.write_learnt``."""
        self._call_to_write("write_learnt", folder)

    def weights_digest(self) -> str:
        """As ``Trainer.weights_digest``."""
        return self._call("weights_digest")

    def put_beside(self, make: MakeBeside) -> None:
        """Have each rank make an object of its weights, which ``ask_beside`` reaches."""
        self._call("put_beside", make)

    def ask_beside(self, method: str, *arguments: object) -> Any:
        """Call a method of that object on every rank; the answer of rank 0."""
        return self._call("ask_beside", method, *arguments)

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _call_to_write(self, method: str, folder: Path) -> None:
        failure = self._call(method, folder)
        if failure is not None:
            raise failure

    def _call(self, method: str, *arguments: object) -> Any:
        with self._lock:  # a checkpoint is waited for on a thread of its own
            return self._ranks.call(method, *arguments)

    def _see_progress(self) -> None:
        progress = self.progress()
        self.version = int(progress["version"])
        self.kl_coefficient = progress["kl_coefficient"]

    def _copy_weights(self) -> None:
        """Bring the driver's copy up to date, a bucket at a time."""
        mine = dict(self.model.named_parameters())
        self._call("begin_gathering")
        while bucket := self._call("next_bucket", BUCKET_BYTES):
            for name, weight in bucket:
                mine[name].data.copy_(weight)


class TrainerRank:
    """One rank: a trainer over its part of the weights. The ranks' methods are called together."""

    def __init__(self, config: RunConfig) -> None:
        """Load every model and cut it; raises ``UserError``."""
        choose_matmul_kernel()
        policy = load_policy(_in_host_memory(config).model, config.seed, in_parts=True)
        trainer = self._trainer = build_trainer(policy, config, config.placement.learning)
        self.prepare, self.unmask_observations = trainer.prepare, trainer.unmask_observations
        self.progress, self.weights_digest = trainer.progress, trainer.weights_digest
        # A thread begins on the first GPU, and a copy from another would not be waited for.
        on_gpu = partial(torch.cuda.set_device, trainer.device) if trainer.on_gpu else None
        self._writer, self._writing = ThreadPoolExecutor(1, "checkpoint", on_gpu), Future[None]()
        self._writing.set_result(None)
        self._gathered: Iterator[tuple[str, Tensor]] = iter(())
        self._beside: object = None
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
        finally:
            self._give_back()

    def load(self, checkpoint: Path, progress: Progress) -> None:
        """As ``Trainer.load``."""
        self._trainer.load(checkpoint, progress)
        self._give_back()

    def write_merged(self, folder: Path) -> OSError | None:
        """As ``Trainer.write_merged``; a failure of the disk is told, not raised."""
        return self._failure_of(self._trainer.write_merged, folder)

    def write_learnt(self, folder: Path) -> OSError | None:
        """As ``Trainer.write_learnt``; a failure of the disk is told, not raised."""
        return self._failure_of(self._trainer.write_learnt, folder)

    def _failure_of(self, write: Callable[[Path], None], folder: Path) -> OSError | None:
        try:
            write(folder)
        except OSError as error:
            return error
        finally:
            self._give_back()
        return None

    def begin_writing(self, folder: Path, is_copied: bool) -> None:
        """Begin this rank's part of a checkpoint, on a thread of its own."""
        self._writing = self._writer.submit(self._trainer.writer(folder, is_copied))

    def has_written(self) -> bool | OSError:
        """Whether all ranks have written their parts; a failure of the disk is told, not raised."""
        if not self._writing.done():
            return False
        try:
            self._writing.result()
        except OSError as error:
            return error
        return True

    def put_beside(self, make: MakeBeside) -> None:
        """Make an object of this rank's weights, and keep it."""
        self._beside = make(self._trainer)

    def ask_beside(self, method: str, *arguments: object) -> Any:
        """Call a method of that object."""
        answer = getattr(self._beside, method)(*arguments)
        self._give_back()
        return answer

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
        return bucket

    def _give_back(self) -> None:
        """Leave to a server beside it what torch keeps of a GPU's memory for later."""
        if self._takes_turns:
            torch.cuda.empty_cache()  # nothing is kept of a CPU's


MakeBeside = Callable[[Trainer], object]
"""Makes what is kept beside a rank's trainer: picklable, and the same on all ranks."""

AnyTrainer = Trainer | TrainerRanks
"""What the loop holds."""

"""The trainer of a run: in this process, or as ranks that hold the weights in parts.

The loop holds ``TrainerRanks`` as it would hold a ``Trainer``. Each rank is a process with a
``Trainer`` that has cut its models; every call goes to all ranks with the whole step, and rank 0
answers. Ranks read, write and send the weights themselves. The driver has a copy of them only
where its own engine samples with it, and brings it up to date after a step, while the ranks wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from forage.algorithms.packing import pack_mini_batches
from forage.batch import Batch, Weighed
from forage.config.environment_config import EnvironmentConfig
from forage.config.run_config import RunConfig
from forage.config.search_config import SearchConfig
from forage.hardware import choose_matmul_kernel
from forage.models import attention
from forage.rewards.reward_config import RewardConfig
from forage.training.checkpoints.saved_weights import restore_model
from forage.training.model import load_policy
from forage.training.ranks.rank_processes import RankProcesses, StartRanks
from forage.training.ranks.skeleton import without_weights
from forage.training.ranks.trainer_rank import MakeBeside, TrainerRank, build_trainer
from forage.training.sequence_cost import cost_of
from forage.training.trainer import Progress, Trainer

BUCKET_BYTES = 256 << 20
"""Weights travel to the driver's copy in buckets of this size, of which it holds one beside it."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 2.0
"""Pauses between questions to ranks whether they have written."""


def _without_functions(config: RunConfig) -> RunConfig:
    """``config`` without the functions of the caller's, which ranks neither need nor can import."""
    sections = {
        "reward": RewardConfig(),
        "environment": EnvironmentConfig(),
        "search": SearchConfig(),
    }
    return config.model_copy(update=sections)


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
            partial(TrainerRank, _without_functions(config)),
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

    def text_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """As ``Trainer.text_logprobs``."""
        return self._call("text_logprobs", token_ids)

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


AnyTrainer = Trainer | TrainerRanks
"""What the loop holds."""

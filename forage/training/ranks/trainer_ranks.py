"""Opens a run's trainer: in this process, or as ranks that shard the weights.

The loop uses ``TrainerRanks`` like a ``Trainer``. Each rank is a process with a ``Trainer`` that
has sharded its models; every call goes to all ranks with the whole step, and rank 0 replies. Ranks
read, write and send the weights themselves. The driver has a copy only if its own engine samples
with it, and updates the copy after each step, while the ranks wait.
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
from forage.batch import Batch, Credited
from forage.config.environment_config import EnvironmentConfig
from forage.config.run_config import RunConfig
from forage.config.search_config import SearchServer
from forage.hardware import choose_matmul_kernel
from forage.models import attention
from forage.rewards.reward_config import RewardConfig
from forage.training.checkpoints.saved_weights import restore_model
from forage.training.model import load_policy
from forage.training.ranks.rank_processes import RankProcesses, StartRanks
from forage.training.ranks.skeleton import without_weights
from forage.training.ranks.trainer_rank import MakeAttached, TrainerRank, build_trainer
from forage.training.sequence_cost import cost_of
from forage.training.trainer import Progress, Trainer

BUCKET_BYTES = 256 << 20
"""Size of the buckets in which weights are sent to the driver's copy."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 2.0
"""Pauses between polls of whether the ranks have written."""


def _without_functions(config: RunConfig) -> RunConfig:
    """``config`` without the caller's own functions, which ranks neither need nor can import."""
    sections = {
        "reward": RewardConfig(),
        "environment": EnvironmentConfig(),
        "search": SearchServer(),
    }
    return config.model_copy(update=sections)


def open_trainer(config: RunConfig, start_ranks: StartRanks = RankProcesses) -> AnyTrainer:
    """Opens the trainer of ``placement``, in this process or as ranks; raises ``UserError``."""
    choose_matmul_kernel()
    model = config.model
    if config.placement.num_ranks is None:
        return build_trainer(load_policy(model, config.seed), config)
    if config.placement.has_server:  # the driver's model computes nothing and needs no weights
        model = model.model_copy(update={"device": "cpu"})
        policy = without_weights(load_policy(model, config.seed, in_parts=True))
    else:
        policy = load_policy(model, config.seed)
    return TrainerRanks(policy, config, start_ranks)


class TrainerRanks:
    """The ranks as one trainer, callable from any thread."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, start_ranks: StartRanks) -> None:
        """Starts the ranks; raises ``UserError`` if they cannot load or shard their models."""
        attention.install(model)
        self.model = model
        """A copy for the in-process engine, or the modules without weights."""
        self._config = config
        self._has_copy = not config.placement.has_server
        self._lock = threading.Lock()
        algorithm = config.algorithm
        self._looks_ahead = (
            algorithm.needs_recomputed_logprobs
            or algorithm.kl is not None
            or algorithm.critic is not None
            or algorithm.advantage.extra is not None
            or algorithm.information_gain is not None
        )
        placement = config.placement
        assert placement.num_ranks is not None, "one process needs no ranks"
        trainer = placement.learning
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
        self, credited_P: Sequence[Sequence[Credited]]
    ) -> tuple[list[list[Credited]], dict[str, float]]:
        """As ``Trainer.prepare``."""
        if not self._looks_ahead:
            return [list(credited) for credited in credited_P], {}
        return self._call("prepare", credited_P)

    def pack(
        self, credited_P: Sequence[Sequence[Credited]]
    ) -> tuple[list[Batch], dict[str, float]]:
        """As ``Trainer.pack``; micro-batches in multiples of the ranks that take them."""
        metrics: dict[str, float] = {}
        if self._config.algorithm.train_observations:
            credited_P, metrics = self._call("unmask_observations", credited_P)
        sizes = self._config.trainer
        batches = pack_mini_batches(
            credited_P,
            self._config.algorithm.loss.mark,
            sizes.num_mini_batches,
            sizes.max_tokens_per_micro_batch,
            cost_of(self.model),
            self._num_data_ranks,
        )
        return batches, metrics

    def learn(
        self,
        batches: Sequence[Batch],
        changing: AbstractContextManager[object],
        rate_factor: float = 1.0,
    ) -> dict[str, float]:
        """Like ``Trainer.learn``; the driver's copy changes once, at the end.

        Without a copy, the ranks' own weights are published, so ``changing`` covers the whole step.
        """
        with nullcontext() if self._has_copy else changing:
            metrics = self._call("learn", batches, rate_factor)
        if isinstance(metrics, FloatingPointError):
            raise metrics
        if self._has_copy:
            with changing:
                self._copy_weights()
        self._see_progress()
        return metrics

    def progress(self) -> Progress:
        return self._call("progress")

    def writer(self, folder: Path, is_copied: bool) -> Callable[[], None]:
        """Like ``Trainer.writer``: starts writing on each rank; the result waits for all."""
        self._call("begin_writing", folder, is_copied)
        return self._wait_for_writing

    def _wait_for_writing(self) -> None:
        """Polls the ranks, which keep training, between their calls."""
        pause_s = _FIRST_LOOK_S
        while not (ended := self._call("has_written")):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        if isinstance(ended, OSError):
            raise ended

    def load(self, checkpoint: Path, progress: Progress) -> None:
        if self._has_copy:
            restore_model(self.model, checkpoint)
        self._call("load", checkpoint, progress)
        self._see_progress()

    def write_merged(self, folder: Path) -> None:
        """Like ``Trainer.write_merged``; each rank writes some of the weights."""
        self._call_to_write("write_merged", folder)

    def write_learnt(self, folder: Path) -> None:
        self._call_to_write("write_learnt", folder)

    def text_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return self._call("text_logprobs", token_ids)

    def weights_digest(self) -> str:
        return self._call("weights_digest")

    def attach(self, make: MakeAttached) -> None:
        """Creates an object from each rank's trainer, for ``call_attached``."""
        self._call("attach", make)

    def call_attached(self, method: str, *arguments: object) -> Any:
        """Calls a method of the attached object on every rank; returns rank 0's result."""
        return self._call("call_attached", method, *arguments)

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.close()

    def _call_to_write(self, method: str, folder: Path) -> None:
        failure = self._call(method, folder)
        if failure is not None:
            raise failure

    def _call(self, method: str, *arguments: object) -> Any:
        with self._lock:  # another thread may be waiting for a checkpoint
            return self._ranks.call(method, *arguments)

    def _see_progress(self) -> None:
        progress = self.progress()
        self.version = int(progress["version"])
        self.kl_coefficient = progress["kl_coefficient"]

    def _copy_weights(self) -> None:
        """Updates the driver's copy, one bucket at a time."""
        mine = dict(self.model.named_parameters())
        self._call("begin_gathering")
        while bucket := self._call("next_bucket", BUCKET_BYTES):
            for name, weight in bucket:
                mine[name].data.copy_(weight)


AnyTrainer = Trainer | TrainerRanks
"""The trainer that the loop uses."""

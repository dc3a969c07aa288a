"""One rank of a sharded trainer: the object in its process, whose methods the driver calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forage.batch import Batch
from forage.config.placement_config import TrainerPlacement
from forage.config.run_config import RunConfig
from forage.environment.codec import Codec
from forage.hardware import choose_matmul_kernel
from forage.training.critic import Critic
from forage.training.golden_beliefs import GoldenBeliefs
from forage.training.micro_batches import LearningCost
from forage.training.model import load_critic_base, load_policy, load_reference, load_tokenizer
from forage.training.ranks.sharding import gathered
from forage.training.trainer import Progress, Trainer

LOG = logging.getLogger(__name__)

MakeAttached = Callable[[Trainer], object]
"""Creates an object from a rank's trainer; must be picklable and the same on all ranks."""


class TrainerRank:
    """A trainer over one rank's part of the weights; methods are called on all ranks together."""

    def __init__(self, config: RunConfig) -> None:
        """Loads and shards every model; raises ``UserError``."""
        choose_matmul_kernel()
        policy = load_policy(_in_host_memory(config).model, config.seed, in_parts=True)
        trainer = self._trainer = build_trainer(policy, config, config.placement.learning)
        self.prepare, self.unmask_observations = trainer.prepare, trainer.unmask_observations
        self.progress, self.weights_digest = trainer.progress, trainer.weights_digest
        # A thread starts on the first GPU, and would not wait for a copy from another GPU.
        on_gpu = partial(torch.cuda.set_device, trainer.device) if trainer.on_gpu else None
        self._writer, self._writing = ThreadPoolExecutor(1, "checkpoint", on_gpu), Future[None]()
        self._writing.set_result(None)
        self._gathered: Iterator[tuple[str, Tensor]] = iter(())
        self._attached: object = None
        self._takes_turns = config.placement.engine.offload
        self._give_back()

    def learn(
        self, batches: Sequence[Batch], rate_factor: float
    ) -> dict[str, float] | FloatingPointError:
        """Like ``Trainer.learn``, but returns the error of a diverged run.

        Raising it would end the ranks, which a rollback needs. All ranks see the same norm.
        """
        try:
            return self._trainer.learn(batches, nullcontext(), rate_factor)
        except FloatingPointError as error:
            return error
        finally:
            self._give_back()

    def load(self, checkpoint: Path, progress: Progress) -> None:
        self._trainer.load(checkpoint, progress)
        self._give_back()

    def text_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        values = self._trainer.text_logprobs(token_ids)
        self._give_back()
        return values

    def write_merged(self, folder: Path) -> OSError | None:
        """Like ``Trainer.write_merged``, but returns a disk error."""
        return self._failure_of(self._trainer.write_merged, folder)

    def write_learnt(self, folder: Path) -> OSError | None:
        """Like ``Trainer.write_learnt``, but returns a disk error."""
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
        """Starts writing this rank's part of a checkpoint on a separate thread."""
        self._writing = self._writer.submit(self._trainer.writer(folder, is_copied))

    def has_written(self) -> bool | OSError:
        """Whether this rank has written its part; returns a disk error."""
        if not self._writing.done():
            return False
        try:
            self._writing.result()
        except OSError as error:
            return error
        return True

    def attach(self, make: MakeAttached) -> None:
        """Creates an object from this rank's trainer, and keeps it."""
        self._attached = make(self._trainer)

    def call_attached(self, method: str, *arguments: object) -> Any:
        """Calls a method of the attached object."""
        answer = getattr(self._attached, method)(*arguments)
        self._give_back()
        return answer

    def begin_gathering(self) -> None:
        """Starts over with the first trained weight."""
        self._gathered = gathered(self._trainer.model)

    def next_bucket(self, num_bytes: int) -> list[tuple[str, Tensor]]:
        """Gathers the next weights until they have ``num_bytes``; empty at the end."""
        bucket: list[tuple[str, Tensor]] = []
        for name, weight in self._gathered:
            bucket.append((name, weight.cpu()))
            num_bytes -= weight.nbytes
            if num_bytes <= 0:
                break
        return bucket

    def _give_back(self) -> None:
        """Releases torch's cached GPU memory to a server on the same GPU."""
        if self._takes_turns:
            torch.cuda.empty_cache()  # does nothing on a CPU


def build_trainer(
    model: PreTrainedModel, config: RunConfig, placement: TrainerPlacement | None = None
) -> Trainer:
    """Creates a run's trainer, with the reference and critic that its algorithm needs.

    ``placement`` makes it a rank, whose models are read and moved to its device part by part.
    Raises ``UserError`` if a model cannot be loaded.
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
            "algorithm.train_observations is on: the policy is trained on the text of search "
            "results as if it had written it. This ablation measures the effect of masking; "
            "leave it off to train a useful policy"
        )
    golden = None
    if algorithm.information_gain is not None:
        golden = GoldenBeliefs(Codec(load_tokenizer(config.model)), algorithm.information_gain)
    cost = None if in_parts else LearningCost.of(config, model)
    rest = (reference, critic, placement, golden, device_type, cost)
    return Trainer(model, config.trainer, algorithm, config.rollout.temperature, *rest)


def _in_host_memory(config: RunConfig) -> RunConfig:
    """The config with models on the CPU, because a GPU may only have room for its parts."""
    model = config.model.model_copy(update={"device": "cpu"})
    return config.model_copy(update={"model": model})

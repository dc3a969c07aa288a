"""One of the ranks that hold the weights in parts: what its process has, and the driver calls."""

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

MakeBeside = Callable[[Trainer], object]
"""Makes what is kept beside a rank's trainer: picklable, and the same on all ranks."""


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

    def text_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """As ``Trainer.text_logprobs``."""
        values = self._trainer.text_logprobs(token_ids)
        self._give_back()
        return values

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
    cost = None if in_parts else LearningCost.of(config, model)
    beside = (reference, critic, placement, golden, device_type, cost)
    return Trainer(model, config.trainer, algorithm, config.rollout.temperature, *beside)


def _in_host_memory(config: RunConfig) -> RunConfig:
    """The run with its models on the CPU: a GPU that has room for parts may have none for all."""
    model = config.model.model_copy(update={"device": "cpu"})
    return config.model_copy(update={"model": model})

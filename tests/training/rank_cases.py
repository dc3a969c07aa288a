"""What the tests ask of ranks: the gradient of a batch, however it is cut over processes."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from forage.algorithms.credit.gae import Gae
from forage.algorithms.packing import pack
from forage.batch import Batch
from forage.config.algorithm_config import AlgorithmConfig, CriticConfig
from forage.config.model_config import LoraConfig
from forage.config.placement_config import TrainerPlacement
from forage.config.trainer_config import TrainerConfig
from forage.errors import UserError
from forage.training import lora
from forage.training.critic import Critic
from forage.training.sharding import gathered, whole
from forage.training.trainer import Trainer
from tests.rollout.tiny_models import Architecture, make_model
from tests.training.sequences import episode, weighed

_CUT_ALONE = TrainerPlacement()
PPO = AlgorithmConfig(advantage=Gae(critic=CriticConfig(learning_rate=1e-3, max_grad_norm=1e9)))


@dataclass(frozen=True, slots=True)
class Case:
    """A model, an algorithm and a batch; ``placement`` says how ranks share them."""

    name: str
    placement: TrainerPlacement = _CUT_ALONE
    architecture: Architecture = "qwen2"
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    num_episodes: int = 6
    max_tokens: int = 160
    has_adapters: bool = False
    checkpoints_activations: bool = False
    dtype: torch.dtype = torch.float64
    max_grad_norm: float = 1e9


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a step gave: the gradients of policy and critic by name, and the metrics."""

    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    weights: dict[str, Tensor]


def batch_of(case: Case) -> Batch:
    advantages = (1.0, -0.5, 0.25, -1.5, 0.75, 2.0)
    each = [weighed(episode(i), advantages[i % 6]) for i in range(case.num_episodes)]
    return pack(each, case.max_tokens)


def cast(case: Case, model: PreTrainedModel) -> PreTrainedModel:
    """The weights in the case's type; the angles of positions stay, as in a model from a file."""
    for weight in model.parameters():
        weight.data = weight.data.to(case.dtype)
    return model


def trainer_of(case: Case, placement: TrainerPlacement | None) -> Trainer:
    model = cast(case, make_model(case.architecture))
    if case.has_adapters:
        lora.add_adapters(model, LoraConfig(rank=4), "base", seed=1)
        for name, weight in model.named_parameters():
            if "lora_" in name:  # at first B is 0, and so would be the gradient of A
                torch.manual_seed(2)
                weight.data = 0.1 * torch.randn(weight.shape, dtype=case.dtype)
    if case.checkpoints_activations:
        model.gradient_checkpointing_enable()
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
    critic, reference = None, None
    if case.algorithm.critic is not None:
        critic = Critic(cast(case, make_model(case.architecture, seed=3)))
        nn.init.normal_(critic.head.weight)
    if case.algorithm.kl is not None:
        reference = cast(case, make_model(case.architecture, seed=4)).requires_grad_(False)
    config = TrainerConfig(learning_rate=1e-3, max_grad_norm=case.max_grad_norm)
    return Trainer(model, config, case.algorithm, 1.0, reference, critic, placement)


def learn(case: Case, placement: TrainerPlacement | None) -> Learnt:
    """One step of the policy, and of the critic where there is one."""
    trainer = trainer_of(case, placement)
    gradients: dict[str, Tensor] = {}
    roots: dict[str, nn.Module] = {"policy": trainer.model}
    optimizers = [trainer.optimizer]
    if trainer.critic is not None:
        roots["critic"] = trainer.critic.critic
        optimizers.append(trainer.critic.optimizer)

    def keep(*_: object) -> None:
        for kind, root in roots.items():
            for name, weight in root.named_parameters():
                if weight.grad is not None:
                    gradients[f"{kind}.{name}"] = whole(weight.grad.detach()).clone()

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(keep)
    batch = batch_of(case)
    metrics = trainer.critic.step(batch) if trainer.critic is not None else {}
    metrics |= trainer.step(batch, nullcontext())
    return Learnt(gradients, metrics, dict(gathered(trainer.model)))


class Rank:
    """One of several processes, which has nothing but what each call makes."""

    def learn(self, case: Case) -> Learnt:
        return learn(case, case.placement)

    def weights_after(self, case: Case, foreach: bool) -> dict[str, Tensor]:
        """After three steps of AdamW, which takes all weights at once, or one after the other."""
        trainer = trainer_of(case, case.placement)
        for group in trainer.optimizer.param_groups:
            group["foreach"] = foreach
        for _ in range(3):
            trainer.step(batch_of(case), nullcontext())
        return dict(gathered(trainer.model))


class Unlucky:
    """Ranks of which the second does not come to the sum that the first waits in."""

    def sum(self) -> None:
        if dist.get_rank() == 1:
            raise UserError("rank 1 has no luck")
        dist.all_reduce(torch.zeros(1))

    def die(self) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))

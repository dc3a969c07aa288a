"""Puts a run's trainer together, with the models that its algorithm needs beside the policy."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from forage.config.placement_config import TrainerPlacement
from forage.config.run_config import RunConfig
from forage.environment.codec import Codec
from forage.training.critic import Critic
from forage.training.golden_beliefs import GoldenBeliefs
from forage.training.model import load_critic_base, load_reference, load_tokenizer
from forage.training.trainer import Trainer

LOG = logging.getLogger(__name__)


def build_trainer(
    model: PreTrainedModel, config: RunConfig, placement: TrainerPlacement | None = None
) -> Trainer:
    """The trainer of a run, with the reference and the critic that its algorithm needs.

    ``placement`` makes it a rank. Raises ``UserError`` if one of their models cannot be loaded.
    """
    algorithm = config.algorithm
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
    beside = (reference, critic, placement, golden)
    return Trainer(model, config.trainer, algorithm, config.rollout.temperature, *beside)

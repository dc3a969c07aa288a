"""The published recipes mean in the new syntax what they meant in the old one, key by key.

``MENDED`` lists the values that were since corrected to match the originals.
"""

from pathlib import Path
from typing import Any

import pytest

from forage.config.run_config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"

# The recipes' values before settings had kinds, with defaults: active values by their old keys.
ALL = {
    "algorithm.loss": "clipped",
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.2,
    "algorithm.dual_clip": None,
    "algorithm.decoupled": False,
    "algorithm.aggregate": "token_mean",
    "algorithm.train_observations": False,
    "algorithm.entropy_coefficient": 0.0,
    "algorithm.kl.coefficient": 0.001,
    "algorithm.kl.reference": None,
    "algorithm.kl.target": None,
    "algorithm.likelihood_protection.coefficient": None,
    "algorithm.overlong.max_tokens": None,
    "algorithm.dynamic_sampling.is_enabled": None,
    "algorithm.correction.weights": None,
    "algorithm.correction.reject": None,
    "algorithm.correction.veto": None,
    "sentinel.action": "warn",
    "sentinel.window": 8,
    "sentinel.patience": 2,
    "warm_start.optimizer": "muon",
    "warm_start.poor_share": 0.6,
    "warm_start.learning_rate": 0.003,
    "warm_start.matrix_learning_rate": 0.02,
    "placement.num_nodes": 1,
    "placement.gpus_per_node": 8,
    "placement.tensor_parallel": 1,
    "placement.offload": True,
}
GRPO = {
    **ALL,
    "algorithm.advantage": "grpo",
    "algorithm.normalise_by_std": True,
    "algorithm.kl.form": "k3",
    "algorithm.kl.place": "loss",
}
PPO = {
    **ALL,
    "algorithm.advantage": "gae",
    "algorithm.discount": 1.0,
    "algorithm.gae_lambda": 1.0,
    "algorithm.whiten": True,
    "algorithm.turns.retrieval_bonus": 0.0,
    "algorithm.turns.search_cost": 0.0,
    "algorithm.critic.path": None,
    "algorithm.critic.learning_rate": 1e-5,
    "algorithm.critic.warmup_steps": 30,
    "algorithm.critic.weight_decay": 0.0,
    "algorithm.critic.max_grad_norm": 1.0,
    "algorithm.critic.value_clip": 0.5,
    "algorithm.critic.num_warmup_steps": 0,
    "algorithm.kl.form": "k1",
    "algorithm.kl.place": "reward",
}
FOUR_NODES = {"placement.num_nodes": 4, "placement.engine": "vllm"}
RECIPES: dict[str, dict[str, Any]] = {
    "rlinf-3b": {**GRPO, "placement.engine": "sglang"},
    "search-r1-grpo-32b": {
        **GRPO,
        **FOUR_NODES,
        "placement.tensor_parallel": 2,
    },
    "search-r1-grpo-72b": {**GRPO, **FOUR_NODES, "placement.tensor_parallel": 4},
    "search-r1-grpo-v0.2": {**GRPO, "placement.engine": "vllm"},
    "search-r1-grpo-v0.3-format": {**GRPO, "placement.engine": "vllm"},
    "search-r1-ppo-v0.2": {**PPO, "placement.engine": "vllm"},
    "search-r1-ppo-v0.3-format": {**PPO, "placement.engine": "vllm"},
    "slime-lite-3b": {
        **GRPO,
        "algorithm.clip_high": 0.28,
        "placement.engine": "sglang",
        "placement.gpus_per_node": 4,
        "placement.tensor_parallel": 2,
    },
    "verl-sglang-3b": {**GRPO, "placement.engine": "sglang"},
}
# The originals take the old policy from the trainer; the rest is in docs/recipes.md.
SEARCH_R1 = {"algorithm.decoupled": True, "algorithm.entropy_coefficient": 0.001}
MENDED: dict[str, dict[str, Any]] = {
    **{name: SEARCH_R1 for name in RECIPES if name.startswith("search-r1")},
    "rlinf-3b": {"algorithm.decoupled": True, "algorithm.aggregate": "sequence_mean"},
    "slime-lite-3b": {"algorithm.decoupled": True, "algorithm.aggregate": "sequence_mean"},
    "verl-sglang-3b": {"algorithm.decoupled": True, "algorithm.dual_clip": 3.0},
}
MOVED = {
    "algorithm.advantage": "algorithm.advantage.kind",
    "algorithm.normalise_by_std": "algorithm.advantage.normalise_by_std",
    "algorithm.discount": "algorithm.advantage.discount",
    "algorithm.gae_lambda": "algorithm.advantage.gae_lambda",
    "algorithm.whiten": "algorithm.advantage.whiten",
    "algorithm.turns": "algorithm.advantage",
    "algorithm.critic": "algorithm.advantage.critic",
    "algorithm.loss": "algorithm.loss.kind",
    "algorithm.clip_low": "algorithm.loss.low",
    "algorithm.clip_high": "algorithm.loss.high",
    "algorithm.dual_clip": "algorithm.loss.dual_clip",
    "algorithm.aggregate": "algorithm.aggregate.kind",
    "algorithm.kl.target": "algorithm.kl.adaptive",
    "algorithm.likelihood_protection.coefficient": "algorithm.likelihood_protection",
    "algorithm.overlong.max_tokens": "algorithm.overlong",
    "algorithm.dynamic_sampling.is_enabled": "algorithm.dynamic_sampling",
    "sentinel.action": "sentinel.kind",
    "warm_start.optimizer": "warm_start.optimizer.kind",
    "warm_start.poor_share": "warm_start.source.poor_share",
    "warm_start.matrix_learning_rate": "warm_start.optimizer.matrix_learning_rate",
    "placement.engine": "placement.engine.kind",
    "placement.tensor_parallel": "placement.engine.tensor_parallel",
    "placement.offload": "placement.engine.offload",
}


def new_path(old: str) -> str:
    section, _, name = old.rpartition(".")
    return MOVED.get(old) or f"{MOVED.get(section, section)}.{name}"


def test_every_published_recipe_is_in_the_table() -> None:
    assert set(RECIPES) == {path.stem for path in CONFIGS.glob("*.yaml")} - {
        "own",
        "xquad",
        "browsecomp-plus",
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_means_what_it_meant_in_the_old_spelling(recipe: str) -> None:
    config = load_config(CONFIGS / f"{recipe}.yaml")
    found: dict[str, Any] = {}
    for old in RECIPES[recipe]:
        value: Any = config
        for name in new_path(old).split("."):
            value = getattr(value, name)
        found[old] = value
    assert found == {**RECIPES[recipe], **MENDED[recipe]}

"""Recipes of before: each old key is refused with its new spelling and its value, all at once."""

from typing import Any

import pytest

from forage.config.config_errors import _OFF, _RENAMED
from forage.config.run_config import RunConfig, build_config
from forage.errors import UserError
from forage.settings import models_at

OLD = {
    "algorithm": {
        "advantage": "gae",
        "gae_lambda": 0.9,
        "critic": {"learning_rate": 0.1},
        "turns": {"search_cost": 0.2, "discount": 0.5},
        "baseline": "running",
        "clip_high": 0.28,
        "constant_tokens": 100,
        "kl": {"coefficient": 0.1, "target": 0.2},
        "dynamic_sampling": {"is_enabled": True, "max_rounds": 3},
        "correction": {"weights": "none", "reject": "token", "reject_high": 3.0},
        "likelihood_protection": {"coefficient": 0.0},
    },
    "sentinel": {"action": "stop"},
    "warm_start": {"episodes": ["a", "b"], "select": {"min_reward": 1.0}, "poor_share": 0.5},
    "placement": {"engine": "vllm", "tensor_parallel": 2},
}
NEW = [
    "algorithm.gae_lambda: 0.9  ->  algorithm.advantage.gae_lambda: 0.9",
    "algorithm.critic.learning_rate: 0.1  ->  algorithm.advantage.critic.learning_rate: 0.1",
    "algorithm.turns.search_cost: 0.2  ->  algorithm.advantage.search_cost: 0.2",
    "algorithm.turns.discount: 0.5  ->  algorithm.advantage.turn_discount: 0.5",
    "algorithm.baseline: running  ->  algorithm.advantage.baseline.kind: running",
    "algorithm.clip_high: 0.28  ->  algorithm.loss.high: 0.28",
    "algorithm.constant_tokens: 100  ->  algorithm.aggregate.tokens: 100",
    "algorithm.kl.target: 0.2  ->  algorithm.kl.adaptive.target: 0.2",
    "algorithm.dynamic_sampling.is_enabled: true  ->  algorithm.dynamic_sampling: {}",
    "algorithm.correction.weights: none  ->  algorithm.correction.weights: null",
    "algorithm.correction.reject: token  ->  algorithm.correction.reject.level: token",
    "algorithm.correction.reject_high: 3.0  ->  algorithm.correction.reject.high: 3.0",
    "algorithm.likelihood_protection.coefficient: 0.0  ->  algorithm.likelihood_protection: null",
    "sentinel.action: stop  ->  sentinel.kind: stop",
    "warm_start.select.min_reward: 1.0  ->  warm_start.source.select.min_reward: 1.0",
    "warm_start.poor_share: 0.5  ->  warm_start.source.poor_share: 0.5",
    "placement.tensor_parallel: 2  ->  placement.engine.tensor_parallel: 2",
]


def said_of(tree: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        build_config({"model": {"path": "m"}, **tree}, source="old.yaml")
    return str(error.value)


def test_each_old_key_is_told_in_its_new_spelling() -> None:
    said = said_of(OLD)
    assert said.startswith("old.yaml: ")
    assert [line for line in NEW if line not in said] == []
    assert "warm_start.source.kind: recorded, warm_start.source.episodes: ['a', 'b']" in said


@pytest.mark.parametrize("value", [False, "off"])
def test_a_sentinel_that_was_off_is_null(value: object) -> None:
    """YAML reads a bare off as false."""
    assert "->  sentinel: null" in said_of({"sentinel": {"action": value}})


@pytest.mark.parametrize("path", [*_RENAMED.values(), *_OFF.values()])
def test_what_is_named_as_the_new_spelling_is_a_key(path: str) -> None:
    *sections, last = path.split(".")
    models = [RunConfig]
    for name in sections:
        models = models_at(models, name)
    assert any(last in model.model_fields for model in models)

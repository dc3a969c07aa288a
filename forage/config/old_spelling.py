"""Keys that recipes once had, and what they are called now.

A recipe that still has one is refused with the new spelling of each. Delete a line when nobody is
left who could have such a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_RENAMED = {
    "algorithm.normalise_by_std": "algorithm.advantage.normalise_by_std",
    "algorithm.baseline": "algorithm.advantage.baseline.kind",
    "algorithm.baseline_decay": "algorithm.advantage.baseline.decay",
    "algorithm.pass_k": "algorithm.advantage.k",
    "algorithm.discount": "algorithm.advantage.discount",
    "algorithm.gae_lambda": "algorithm.advantage.gae_lambda",
    "algorithm.whiten": "algorithm.advantage.whiten",
    "algorithm.turns.discount": "algorithm.advantage.turn_discount",
    "algorithm.turns.retrieval_bonus": "algorithm.advantage.retrieval_bonus",
    "algorithm.turns.search_cost": "algorithm.advantage.search_cost",
    "algorithm.critic": "algorithm.advantage.critic",
    "algorithm.clip_low": "algorithm.loss.low",
    "algorithm.clip_high": "algorithm.loss.high",
    "algorithm.dual_clip": "algorithm.loss.dual_clip",
    "algorithm.constant_tokens": "algorithm.aggregate.tokens",
    "algorithm.kl.target": "algorithm.kl.adaptive.target",
    "algorithm.kl.horizon": "algorithm.kl.adaptive.horizon",
    "algorithm.correction.level": "algorithm.correction.weights.level",
    "algorithm.correction.low": "algorithm.correction.weights.low",
    "algorithm.correction.high": "algorithm.correction.weights.high",
    "algorithm.correction.normalise": "algorithm.correction.weights.normalise",
    "algorithm.correction.reject_low": "algorithm.correction.reject.low",
    "algorithm.correction.reject_high": "algorithm.correction.reject.high",
    "sentinel.action": "sentinel.kind",
    "warm_start.episodes": "warm_start.source.episodes",
    "warm_start.select": "warm_start.source.select",
    "warm_start.poor_share": "warm_start.source.poor_share",
    "warm_start.single_passage_share": "warm_start.source.single_passage_share",
    "warm_start.matrix_learning_rate": "warm_start.optimizer.matrix_learning_rate",
    "placement.tensor_parallel": "placement.engine.tensor_parallel",
    "placement.offload": "placement.engine.offload",
}
_OFF = {
    ("algorithm.kl.coefficient", 0): "algorithm.kl",
    ("algorithm.likelihood_protection.coefficient", 0): "algorithm.likelihood_protection",
    ("algorithm.overlong.max_tokens", None): "algorithm.overlong",
    ("algorithm.dynamic_sampling.is_enabled", False): "algorithm.dynamic_sampling",
    ("algorithm.correction.weights", "none"): "algorithm.correction.weights",
    ("algorithm.correction.reject", "none"): "algorithm.correction.reject",
    ("algorithm.kl.target", None): "algorithm.kl.adaptive",
    ("sentinel.action", "off"): "sentinel",
    ("sentinel.action", False): "sentinel",  # YAML reads a bare off as false
}
_LEVELS = ("token", "sequence", "geometric")


def new_spellings(tree: dict[str, Any]) -> list[str]:
    """``old: value -> new: value`` for each key of ``tree`` that is spelt otherwise now."""
    lines: list[str] = []
    for path, value in _leaves(tree, ""):
        new = _new_spelling(path, value)
        if new is not None:
            lines.append(f"{path}: {_shown(value)}  ->  {new}")
    return lines


def _new_spelling(path: str, value: Any) -> str | None:
    is_plain = not isinstance(value, (dict, list))
    if is_plain and (path, value) in _OFF:
        return f"{_OFF[path, value]}: null"
    if path == "algorithm.dynamic_sampling.is_enabled":
        return "algorithm.dynamic_sampling: {}"
    if path == "algorithm.correction.reject" and value in _LEVELS:
        return f"algorithm.correction.reject.level: {value}"
    if path == "warm_start.episodes":
        more = "warm_start.source.kind: recorded, "
        return f"{more}warm_start.source.episodes: {_shown(value)}"
    for old, new in _RENAMED.items():
        if path == old or path.startswith(f"{old}."):
            return f"{new}{path.removeprefix(old)}: {_shown(value)}"
    return None


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)

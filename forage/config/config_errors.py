"""A wrong setting, told to who wrote it: which key, which value, and the nearest key there is.

``run_config.py`` calls ``explain`` where pydantic refused a tree of settings. Before that a recipe
that still has a key of before is refused with the new spelling of each (``new_spellings``).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from forage.config.config_file import leaves
from forage.config.settings_text import all_paths
from forage.errors import did_you_mean
from forage.settings import IMPORT_PATH, kinds_of, models_at

_TYPE_NAME = re.compile(r"(function|lax|nullable)-.*|(tuple|list|dict)\[.*|str|int|float|bool|path")
"""How pydantic calls the members of a union in a location, where they are no keys."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an error lies: its key, the section that holds it, and the kinds of that section."""

    path: str
    section: type[BaseModel]
    kinds: dict[str, type[BaseModel]]
    inner: list[type[BaseModel]]

    @property
    def may_be_null(self) -> bool:
        field = self.section.model_fields.get(self.path.rpartition(".")[2])
        return field is not None and type(None) in get_args(field.annotation)


def explain(root: type[BaseModel], detail: dict[str, Any]) -> str:
    """One of pydantic's errors about settings of ``root``, as a sentence for who wrote them."""
    place = _place(root, detail["loc"])
    path, kinds = place.path, list(kinds_of(place.inner))
    or_null = ", or null to do without" if place.may_be_null else ""
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {path}{_hint(root, place)}"
        case "missing":
            name = path.rpartition(".")[2]
            field = place.section.model_fields.get(name)
            what = f": {field.description}" if field is not None and field.description else ""
            return f"{path} is missing{what}"
        case "union_tag_not_found":
            return f"{path}.kind is missing; there are: {', '.join(kinds)}"
        case "union_tag_invalid":
            tag = str(detail["ctx"]["tag"])
            nearest = did_you_mean(tag, kinds) or "."
            there_are = f"There are: {', '.join(kinds)}{or_null}"
            return f"{path}: there is no kind {tag!r}{nearest} {there_are}"
        case "model_type" | "model_attributes_type" | "dict_type":
            or_kind = " or the name of a kind" if kinds else ""
            needed = f"a section of keys{or_kind} is needed{or_null}"
            return f"{path}: {needed} (got {detail['input']!r})"
        case "string_pattern_mismatch" if detail["ctx"]["pattern"] == IMPORT_PATH:
            needed = "write module:name, of something defined at the top level of that module"
            return f"{path} is {detail['input']!r}; {needed}"
        case "value_error":
            return str(detail["msg"]).removeprefix("Value error, ")
        case _:
            return f"{path}: {detail['msg']} (got {detail['input']!r})"


def _place(root: type[BaseModel], location: tuple[str | int, ...]) -> _Place:
    """The place of an error, without the names of kinds that pydantic puts into its location."""
    names: list[str] = []
    section, inner = root, [root]
    kinds: dict[str, type[BaseModel]] = {}
    siblings: dict[str, type[BaseModel]] = {}
    for part in location:
        if len(inner) > 1 and part in kinds_of(inner):
            siblings = kinds_of(inner)
            inner = [siblings[str(part)]]
        elif isinstance(part, int):
            names.append(str(part))
        elif any(part in model.model_fields for model in inner) or not _TYPE_NAME.fullmatch(part):
            section, kinds = (inner[0], siblings) if len(inner) == 1 else (section, {})
            siblings = {}
            names.append(part)
            inner = models_at([section], part)
    return _Place(".".join(names), section, kinds, inner)


# What other trainers call the keys that are looked for first.
_ELSEWHERE = {
    "batch_size": "trainer.questions_per_step",
    "lr": "trainer.learning_rate",
    "max_steps": "trainer.num_steps",
    "num_generations": "trainer.group_size",
    "total_training_steps": "trainer.num_steps",
    "train_batch_size": "trainer.questions_per_step",
}


def nearest_key(root: type[BaseModel], option: str) -> str | None:
    """The key that somebody meant who wrote it as an option: ``--learning-rate``, ``--lr``."""
    name = option.lstrip("-").replace("-", "_")
    keys = all_paths(root)
    same = [key for key in keys if key.rsplit(".", 1)[-1] == name]
    ours = next((key for key in same if key.startswith("trainer.")), None)
    return _ELSEWHERE.get(name) or ours or next(iter(same), None)


def _hint(root: type[BaseModel], place: _Place) -> str:
    section, _, name = place.path.rpartition(".")
    own = list(place.section.model_fields)
    holders = [kind for kind, model in place.kinds.items() if name in model.model_fields]
    if holders:
        return f": {section} has it with kind: {' or '.join(holders)}"
    if name in _ELSEWHERE:
        return f"; did you mean {_ELSEWHERE[name]}?"
    keys = all_paths(root)
    # The right name in the wrong place is likelier than another name in the same place.
    close = [key for key in keys if key.rsplit(".", 1)[-1] == name]
    close = close or [
        f"{section}.{key}" if section else key
        for key in difflib.get_close_matches(name, own, n=1, cutoff=0.7)
    ]
    return f"; did you mean {close[0]}?" if close else did_you_mean(place.path, keys, cutoff=0.6)


# Keys that recipes once had. Delete a line when nobody is left who could have such a recipe.
def _moved(section: str, into: str, keys: str) -> dict[str, str]:
    return {f"{section}.{key}": f"{section}.{into}.{key}" for key in keys.split()}


_RENAMED = {
    **_moved("algorithm", "advantage", "normalise_by_std discount gae_lambda whiten critic"),
    "algorithm.baseline": "algorithm.advantage.baseline.kind",
    "algorithm.baseline_decay": "algorithm.advantage.baseline.decay",
    "algorithm.pass_k": "algorithm.advantage.k",
    "algorithm.turns.discount": "algorithm.advantage.turn_discount",
    "algorithm.turns.retrieval_bonus": "algorithm.advantage.retrieval_bonus",
    "algorithm.turns.search_cost": "algorithm.advantage.search_cost",
    "algorithm.clip_low": "algorithm.loss.low",
    "algorithm.clip_high": "algorithm.loss.high",
    **_moved("algorithm", "loss", "dual_clip"),
    "algorithm.constant_tokens": "algorithm.aggregate.tokens",
    **_moved("algorithm.kl", "adaptive", "target horizon"),
    **_moved("algorithm.correction", "weights", "level low high normalise"),
    "algorithm.correction.reject_low": "algorithm.correction.reject.low",
    "algorithm.correction.reject_high": "algorithm.correction.reject.high",
    "sentinel.action": "sentinel.kind",
    **_moved("warm_start", "source", "episodes select poor_share single_passage_share"),
    **_moved("warm_start", "optimizer", "matrix_learning_rate"),
    **_moved("placement", "engine", "tensor_parallel offload"),
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
    return [
        f"{path}: {_shown(value)}  ->  {new}"
        for path, value in leaves(tree)
        if (new := _new_spelling(path, value)) is not None
    ]


def _new_spelling(path: str, value: Any) -> str | None:
    # A list of sections, or something of the user's own, cannot be looked up.
    is_plain = value is None or isinstance(value, str | int | float)
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


def _shown(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)

"""What another trainer's key is in a recipe: tables of keys, and their translation.

A trainer is a file beside this one: a table of its keys, the settings that its search example has
beside them, and what only several of its keys together say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Recipe = dict[str, Any]
"""Settings by their dotted names."""

KL_FORMS = {
    **{"kl": "k1", "k1": "k1", "abs": "absolute", "mse": "k2", "k2": "k2"},
    **{"low_var_kl": "k3", "k3": "k3", "low_var_kl+": "k3+", "k3+": "k3+", "k1+": "k1+"},
}
"""What veRL calls the estimates of the divergence, and those who came after it."""

FALLS = {
    **{"constant": 1.0, "constant_with_warmup": 1.0},
    **{"linear": 0.0, "cosine": 0.0, "cosine_with_min_lr": 0.0},
}
"""What schedules leave of the learning rate where no floor is set; a cosine is a line here."""

_SECRET = re.compile(r"(api|access|private|wandb|swanlab)[_-]?key|token$|secret|passw", re.I)

# Why a key has no place in a recipe, where several trainers have it.
MICRO = "micro-batches count tokens; trainer.max_tokens_per_micro_batch is made to fit"
SHUFFLED = "questions are shuffled by the run's seed"
LOGGED = "metrics.jsonl and TensorBoard are always written; tracking.trackers adds others"


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """One key of theirs, and what it is in a recipe.

    Without ``ours`` it has no place there, and ``note`` says why. ``values`` are theirs and what
    each is called here. A derived key is read together with others.
    """

    theirs: str
    ours: str = ""
    note: str = ""
    values: Mapping[str, Any] | None = None
    is_derived: bool = False


def derived(
    theirs: str, ours: str, note: str = "", values: Mapping[str, Any] | None = None
) -> ForeignKey:
    """A key that is read together with others."""
    return ForeignKey(theirs, ours, note, values, is_derived=True)


def none(note: str, names: str) -> list[ForeignKey]:
    """Keys without a place in a recipe, their names apart by spaces, and why."""
    return [ForeignKey(name, note=note) for name in names.split()]


class Given:
    """What a file sets, read by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def number(self, *names: str) -> float | None:
        """The first of these keys that is a number."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
        return None

    def text(self, *names: str) -> str | None:
        """The first of these keys that is set, as text."""
        values = (self.values.get(name) for name in names)
        return next((str(value) for value in values if value is not None), None)

    def flag(self, name: str) -> bool:
        return str(self.values.get(name, False)).lower() in ("true", "1", "yes")

    def first_files(self, train: str, test: str) -> Recipe:
        """The files of questions under our names, of several the first."""
        named = {"data.train": self.values.get(train), "data.test": self.values.get(test)}
        return {
            ours: files[0] if isinstance(files, list) else files
            for ours, files in named.items()
            if files
        }


@dataclass(frozen=True, slots=True)
class ForeignTrainer:
    """A trainer whose settings are translated."""

    name: str
    is_his: Callable[[Mapping[str, Any]], bool]
    """Whether a file with these keys is for it."""
    keys: Sequence[ForeignKey]
    start: Mapping[str, Any]
    """What a recipe for its search example has, whatever the file says."""
    derive: Callable[[Given], Recipe]
    """What several keys say together."""


@dataclass(slots=True)
class Translated:
    """A recipe by dotted names, and what has no place in one."""

    recipe: Recipe
    left_out: list[str] = field(default_factory=list)
    """Sentences: a key, its value, and why."""
    unknown: list[str] = field(default_factory=list)

    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for path, value in self.recipe.items():
            *sections, name = path.split(".")
            section = tree
            for each in sections:
                section = section.setdefault(each, {})
            section[name] = value
        return tree


def translate(trainer: ForeignTrainer, values: Mapping[str, Any]) -> Translated:
    known = {key.theirs: key for key in trainer.keys}
    translated = Translated(dict(trainer.start))
    for name, value in values.items():
        key = known.get(name)
        said = f"{name} = {'(a secret)' if _SECRET.search(name) else value}"
        if key is None:
            translated.unknown.append(said)
        elif not key.ours:
            translated.left_out.append(f"{said}: {key.note}")
        elif key.values is not None and str(value).lower() not in key.values:
            translated.left_out.append(f"{said}: {key.ours} has nothing like it")
        elif not key.is_derived and value is not None:
            ours = value if key.values is None else key.values[str(value).lower()]
            translated.recipe[key.ours] = ours
    translated.recipe |= trainer.derive(Given(values))
    return translated


def table(trainer: ForeignTrainer) -> str:
    """The keys as a table of Markdown."""

    def rows() -> Iterator[str]:
        yield f"| {trainer.name} | Forage | |"
        yield "|---|---|---|"
        for key in sorted(trainer.keys, key=lambda key: key.theirs):
            ours = f"`{key.ours}`" if key.ours else "none"
            renamed = "" if key.values is None else _renamed(key.values)
            yield f"| `{key.theirs}` | {ours} | {'; '.join(filter(None, [renamed, key.note]))} |"

    return "\n".join(rows()) + "\n"


def _renamed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{theirs}: {str(ours).lower() if isinstance(ours, bool) else ours}"
        for theirs, ours in values.items()
        if theirs != str(ours).lower()
    )


def leash(coefficient: float | None, form: str, place: str) -> Recipe:
    """The leash to the reference under our names; without a coefficient there is none."""
    if not coefficient:
        return {}
    kl = {"coefficient": coefficient, "form": KL_FORMS.get(form, "k3"), "place": place}
    return {f"algorithm.kl.{key}": value for key, value in kl.items()}


def fall(style: str, ratio: float | None, floor: float | None, rate: float | None) -> Recipe:
    """The fall of the learning rate under our name: to a share of it, or to a rate."""
    if FALLS.get(style, 1.0):
        return {}
    share = floor / rate if ratio is None and floor and rate else ratio or 0.0
    return {"trainer.final_learning_rate_ratio": min(share, 1.0)}


def whole(number: float) -> int:
    """The nearest whole number, at least 1."""
    return max(1, round(number))

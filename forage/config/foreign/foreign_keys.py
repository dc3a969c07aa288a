"""What another trainer's key is in a recipe: tables of keys, and their translation.

Each trainer has a file here: a table of its keys, its defaults, the settings that its search
example has in its code, and what several keys say together. Every key of a file is carried over,
explained or refused; ``Translated`` holds the sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Recipe = dict[str, Any]
"""Settings by their dotted names."""

KL_FORMS = {
    **{"kl": "k1", "k1": "k1", "abs": "absolute", "mse": "k2", "k2": "k2"},
    **{"low_var_kl": "k3", "k3": "k3", "low_var_kl+": "k3+", "k3+": "k3+", "k1+": "k1+"},
}
"""What veRL and its successors call the estimates of the divergence."""

FALLS = {
    **{"constant": 1.0, "constant_with_warmup": 1.0},
    **{"linear": 0.0, "cosine": 0.0, "cosine_with_min_lr": 0.0},
}
"""The share of the rate that a schedule without a floor ends at; a cosine becomes a line."""

UNSET = "set/"
"""Begins a value that the file cannot give and that the user has to set; the recipe is refused."""

PUBLISHED = {"nq_hotpotqa": 169_615, "searchr1": 169_615, "search-r1": 169_615, "nq_search": 79_168}
"""Training questions of the published sets, by a part of the path that the originals give them."""

_OF_GAE = tuple(f"algorithm.advantage.{name}" for name in ("critic.", "discount", "gae_lambda"))
_SECRET = re.compile(r"(api|access|private|wandb|swanlab)[_-]?key|token$|secret|passw", re.I)

# Why a key of several trainers has no place in a recipe.
MICRO = "micro-batches count tokens and change no gradient: trainer.max_tokens_per_micro_batch"
SHUFFLED = "questions are shuffled by the run's seed"
LOGGED = "metrics.jsonl and TensorBoard are always written; tracking.trackers adds others"
CUT = "training samples from the whole distribution: a cut one breaks the probability ratio"
TEMPLATE = "environment.prompt and the tokenizer's template render prompts"
SERVER = "an option of the server: placement.engine.arguments (vLLM), or your own start of SGLang"
ADAM = "AdamW runs with betas 0.9 and 0.999 and epsilon 1e-8"


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """One of their keys and what it becomes in a recipe.

    A key without ``ours`` has no place in a recipe, and ``note`` says why. ``values`` maps their
    values to ours, and any other value is refused. A derived key is read together with others. A
    name with ``*`` covers every key like it that has no row of its own.
    """

    theirs: str
    ours: str = ""
    note: str = ""
    values: Mapping[str, Any] | None = None
    is_derived: bool = False

    def admits(self, value: Any) -> bool:
        return self.values is None or str(value).lower() in self.values

    def renamed(self, value: Any) -> Any:
        return value if self.values is None else self.values[str(value).lower()]


def derived(
    theirs: str, ours: str, note: str = "", values: Mapping[str, Any] | None = None
) -> ForeignKey:
    """A key that is read together with others."""
    return ForeignKey(theirs, ours, note, values, is_derived=True)


def no_place(table: str) -> list[ForeignKey]:
    """Keys without a place in a recipe, from lines ``why: key key=value|value``.

    Values other than those named are refused: they would train something else.
    """
    keys: list[ForeignKey] = []
    for line in table.strip().splitlines():
        note, _, names = line.rpartition(": ")
        for name, _, only in (each.partition("=") for each in names.split()):
            values = dict.fromkeys(only.split("|")) if only else None
            keys.append(ForeignKey(name, note=note, values=values))
    return keys


class Given:
    """What a file and the trainer's own defaults set; remembers which keys were read."""

    def __init__(self, values: Mapping[str, Any], num_questions: int | None = None) -> None:
        self.values = values
        self.num_questions = num_questions
        self.read: set[str] = set()

    def value(self, *names: str) -> Any:
        """The first of these keys that is set."""
        for name in names:
            if self.values.get(name) is not None:
                self.read.add(name)
                return self.values[name]
        return None

    def number(self, *names: str) -> float | None:
        """The first of these keys that is a number."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.read.add(name)
                return value
        return None

    def text(self, *names: str) -> str | None:
        """The first of these keys that is set, as text."""
        value = self.value(*names)
        return None if value is None else str(value)

    def flag(self, name: str) -> bool:
        return str(self.value(name)).lower() in ("true", "1", "yes")

    def first_files(self, train: str, test: str) -> Recipe:
        """The question files under our names, the first of each list."""
        named = {"data.train": self.value(train), "data.test": self.value(test)}
        return {
            ours: files[0] if isinstance(files, list) else files
            for ours, files in named.items()
            if files
        }

    def steps(self, epochs: str, questions_per_step: float | None) -> int | None:
        """Steps of the passes that a key counts; None if the number of questions is not known."""
        if not (self.num_questions and questions_per_step and (passes := self.number(epochs))):
            return None
        return max(1, int(self.num_questions // questions_per_step * passes))


@dataclass(frozen=True, slots=True)
class ForeignTrainer:
    """A trainer whose settings are translated."""

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether a file with these keys belongs to it."""
    keys: Sequence[ForeignKey]
    start: Mapping[str, Any]
    """What a recipe for its search example contains, whatever the file says."""
    derive: Callable[[Given], Recipe]
    """What several keys say together."""
    train_files: str
    """The key that names the training questions."""
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(default=lambda values: {})
    """The trainer's own defaults that differ from ours, as its keys."""

    def find(self, name: str) -> ForeignKey | None:
        """The row of a key; of several patterns that cover it, the longest."""
        rows = [key for key in self.keys if fnmatchcase(name, key.theirs)]
        return max(rows, key=lambda key: (key.theirs == name, len(key.theirs)), default=None)


@dataclass(slots=True)
class Translated:
    """A recipe by dotted names, and a sentence for each key that does not stand in it as it was."""

    recipe: Recipe
    read_as: list[str] = field(default_factory=list)
    """Keys with another value in the recipe, or read together with others."""
    left_out: list[str] = field(default_factory=list)
    """Known keys without a place or an effect, and why."""
    unknown: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Values that would train something that Forage cannot do."""

    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for path, value in self.recipe.items():
            *sections, name = path.split(".")
            section = tree
            for each in sections:
                section = section.setdefault(each, {})
            section[name] = dict(value) if isinstance(value, dict) else value
        return tree

    def report(self, key: ForeignKey | None, name: str, value: Any, is_read: bool) -> None:
        """Sort one key of the file into the lists above."""
        said = shown(name, value)
        if key is None:
            self.unknown.append(said)
        elif value is None:
            self.left_out.append(f"{said}: not set")
        elif key.is_derived and not is_read:
            note = f" ({key.note})" if key.note else ""
            self.left_out.append(f"{said}: no effect with the file's other settings{note}")
        elif not key.admits(value):
            known = ", ".join(key.values or ())
            what = f"{key.ours} has nothing like it" if key.ours else key.note
            self.refused.append(f"{said}: {what} (known: {known})")
        elif not key.ours:
            self.left_out.append(f"{said}: {key.note}")
        elif repr(ours := self.recipe.get(key.ours)) != repr(value):
            note = f" ({key.note})" if key.note else ""
            what = "stays at its default" if ours is None else f"= {ours}"
            self.read_as.append(f"{said}: {key.ours} {what}{note}")


def shown(name: str, value: Any) -> str:
    """A key and its value, without the value of a secret."""
    return f"{name} = {'(a secret)' if _SECRET.search(name) else value}"


def translate(
    trainer: ForeignTrainer, values: Mapping[str, Any], num_questions: int | None = None
) -> Translated:
    """The recipe, and what became of each key of the file."""
    given = Given({**trainer.defaults(values), **values}, num_questions)
    translated = Translated(dict(trainer.start))
    recipe = translated.recipe
    for name, value in {**trainer.defaults(values), **values}.items():
        key = trainer.find(name)
        if key and key.ours and not key.is_derived and value is not None and key.admits(value):
            recipe[key.ours] = key.renamed(value)
    recipe |= trainer.derive(given)
    _remove_idle(recipe)
    for name, value in values.items():
        translated.report(trainer.find(name), name, value, name in given.read)
    return translated


def _remove_idle(recipe: Recipe) -> None:
    """Take out what does nothing in this recipe and would be refused; a whole episode must fit."""
    idle = [f"placement.trainer.{name}_parallel" for name in ("tensor", "sequence")]
    idle = [name for name in idle if recipe.get(name) == 1]
    if recipe.get("placement.engine.kind", "torch") == "torch":
        idle.append("placement.engine.tensor_parallel")
    if recipe.get("algorithm.advantage.kind") != "gae":
        idle += [name for name in recipe if name.startswith(_OF_GAE)]
    for name in idle:
        recipe.pop(name, None)
    least = recipe.get("environment.max_tokens", 0)
    micro = recipe.get("trainer.max_tokens_per_micro_batch", 16_384)
    if isinstance(least, int) and isinstance(micro, int) and micro < least:
        recipe["trainer.max_tokens_per_micro_batch"] = least


def table(trainer: ForeignTrainer) -> str:
    """The keys as a table of Markdown."""

    def rows() -> Iterator[str]:
        yield f"| {trainer.name} | Forage | |"
        yield "|---|---|---|"
        for key in sorted(trainer.keys, key=lambda key: key.theirs):
            ours = f"`{key.ours}`" if key.ours else "none"
            renamed = _renamed(key.values) if key.values and key.ours else ""
            if key.values and not key.ours:
                renamed = f"only {', '.join(key.values)}"
            yield f"| `{key.theirs}` | {ours} | {'; '.join(filter(None, [renamed, key.note]))} |"

    return "\n".join(rows()) + "\n"


def _renamed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{theirs}: {str(ours).lower() if isinstance(ours, bool) else ours}"
        for theirs, ours in values.items()
        if theirs != str(ours).lower()
    )


def leash(coefficient: float | None, form: Callable[[], str | None], place: str) -> Recipe:
    """The leash to the reference under our names; without a coefficient there is none."""
    if not coefficient:
        return {}
    form_name = KL_FORMS.get((form() or "low_var_kl").lower(), "k3")
    kl = {"coefficient": coefficient, "form": form_name, "place": place}
    return {f"algorithm.kl.{key}": value for key, value in kl.items()}


def fall(style: str, share: Callable[[], float | None]) -> Recipe:
    """The fall of the learning rate under our name, to a share of it that a falling style reads."""
    if FALLS.get(style.lower(), 1.0):
        return {}
    return {"trainer.final_learning_rate_ratio": min(share() or 0.0, 1.0)}


def warmup(steps: float | str | None, ratio: float, updates_per_step: int = 1) -> int | str:
    """Optimizer steps of a warm-up over a share of all steps, which the user may have to set."""
    if isinstance(steps, int | float):
        return int(steps * ratio) * updates_per_step
    return f"{UNSET}trainer.warmup_steps"


def whole(number: float) -> int:
    """The nearest whole number, at least 1."""
    return max(1, round(number))

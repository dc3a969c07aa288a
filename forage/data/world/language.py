"""The language of the generated encyclopedia: invented names, and templates for its sentences.

Names are built from few pieces, so that a model of a million parameters can copy a name it has
never seen: a small byte-level BPE learns each piece as one token, every piece is common even if the
name is new, and the first piece of a name distinguishes it from most others on a page. No name is a
word of another one: a town never shares its name with the first word of a company.

Every kind of sentence has several wordings, so that a fact is found by reading and not by position.
An article calls a relation by the noun that ``ASK`` and ``REFER`` are keyed by; most questions do
not. ``language.yaml`` has the sentences; ``encyclopedia.py`` decides which facts exist.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import resources
from typing import Any

import yaml

BEGINNINGS = tuple(a + b + c for a in "bdfgkmnprstv" for b in "aeio" for c in "ln")
ENDINGS = tuple(a + b for a in "bdfgkmrstv" for b in "aeio")
PERSON_ENDINGS = (
    *("ard", "ash", "eth", "ick", "ina", "isa", "ith", "oph", "ora", "uno", "urt", "yra"),
    *("amy", "eka", "iel", "ost", "umi", "yan", "arc", "ebb", "igo", "oss", "une", "ywn"),
)
REGION_ENDINGS = ("land", "mark", "wick", "shire")

Wordings = tuple[str, ...]


def read_words(name: str) -> dict[str, Any]:
    """The words and sentences of ``{name}.yaml`` in this folder."""
    file = resources.files("forage.data.world") / f"{name}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _wordings(section: str) -> dict[str, Wordings]:
    return {key: tuple(wordings) for key, wordings in _WORDS[section].items()}


_WORDS = read_words("language")
OCCUPATIONS, PRODUCTS = tuple(_WORDS["occupations"]), tuple(_WORDS["products"])
GENRES, TRADES = tuple(_WORDS["genres"]), tuple(_WORDS["trades"])
ARTICLES, FILLERS = _wordings("articles"), _wordings("fillers")
ASK, REFER = _wordings("ask"), _wordings("refer")
FILLER_SHARE = 0.4
"""The share of articles that end with a sentence that answers nothing."""
SECOND_WORDS = {
    "company": ("Mills", "Press", "Works", "Bank"),
    "work": ("Song", "Letters", "Garden", "Night"),
    "event": ("Fair", "Council", "Games", "Parade"),
}
_PERSON_POOLS = ("given", "surname")
NAMESAKE_SHARE = 0.35
"""The share of names that repeat a word of an earlier name of their kind."""


class NameMaker:
    """Draws names; no two full names are equal, whatever their kind."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[str] = set()
        self._given_words: set[str] = set()
        self._words: dict[str, list[str]] = {}

    def draw(self, kind: str) -> str:
        """A name for an entity of this kind; two people may share a given name or a surname."""
        match kind:
            case "person":
                return self._unique(
                    lambda: " ".join(self._word(pool, self._of_person) for pool in _PERSON_POOLS)
                )
            case "town":
                return self._unique(self._fresh)
            case "region":
                return self._unique(lambda: self._longer("", REGION_ENDINGS))
            case _:
                words = SECOND_WORDS[kind]
                return self._unique(
                    lambda: f"{self._word(kind, self._fresh)} {self._rng.choice(words)}"
                )

    def _word(self, pool: str, draw: Callable[[], str]) -> str:
        words = self._words.setdefault(pool, [])
        if words and self._rng.random() < NAMESAKE_SHARE:
            return self._rng.choice(words)
        words.append(draw())
        return words[-1]

    def _fresh(self) -> str:
        word = self._longer(self._rng.choice(ENDINGS), ENDINGS)
        self._given_words.add(word)
        return word

    def _longer(self, middle: str, endings: tuple[str, ...]) -> str:
        """A beginning and an ending, with pieces in between once all shorter words are used."""
        for _ in range(50):
            word = self._rng.choice(BEGINNINGS).capitalize() + middle + self._rng.choice(endings)
            if word not in self._given_words and word not in self._taken:
                return word
        return self._longer(middle + self._rng.choice(ENDINGS), endings)

    def _of_person(self) -> str:
        return self._rng.choice(BEGINNINGS).capitalize() + self._rng.choice(PERSON_ENDINGS)

    def _unique(self, draw: Callable[[], str]) -> str:
        for _ in range(1000):
            name = draw()
            if name not in self._taken:
                self._taken.add(name)
                return name
        raise AssertionError("no new name in a thousand draws: the world is too large")

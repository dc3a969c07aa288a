"""Invented names, made of few syllables, unique within a world, with near-namesakes.

No name is a word of another one: a town is never called like the first word of a company.
Few shared sub-word units are what lets a model of a million parameters copy a name it has never
seen: every syllable is common even when the name is new.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_CONSONANTS = "bdklmnrstv"
_VOWELS = "aeio"
SYLLABLES = tuple(c + v for c in _CONSONANTS for v in _VOWELS)

COMPANY_WORDS = ("Mills", "Press", "Works", "Bank")
WORK_WORDS = ("Song", "Letters", "Garden", "Night")
EVENT_WORDS = ("Fair", "Council", "Games", "Parade")
NAMESAKE_SHARE = 0.35
"""Share of names that repeat a word of an earlier name of their kind."""


class NameMaker:
    """Draws names; no two full names are equal, whatever their kind."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[str] = set()
        self._long_words: set[str] = set()
        self._words: dict[str, list[str]] = {}

    def person(self) -> str:
        """Given name and surname; either may be shared with somebody else."""
        return self._unique(lambda: f"{self._word('given', 2)} {self._word('surname', 2)}")

    def town(self) -> str:
        return self._unique(lambda: self._fresh(3))

    def region(self) -> str:
        return self._unique(lambda: self._fresh(2) + self._rng.choice(("land", "mark")))

    def company(self) -> str:
        return self._unique(lambda: self._with(COMPANY_WORDS, "company"))

    def work(self) -> str:
        return self._unique(lambda: self._with(WORK_WORDS, "work"))

    def event(self) -> str:
        return self._unique(lambda: self._with(EVENT_WORDS, "event"))

    def _with(self, words: tuple[str, ...], kind: str) -> str:
        return f"{self._word(kind, 3)} {self._rng.choice(words)}"

    def _word(self, pool: str, num_syllables: int) -> str:
        words = self._words.setdefault(pool, [])
        if words and self._rng.random() < NAMESAKE_SHARE:
            return self._rng.choice(words)
        words.append(self._fresh(num_syllables))
        return words[-1]

    def _fresh(self, num_syllables: int) -> str:
        """A word that a name may be made of; one of three syllables is given only once."""
        while True:
            word = "".join(self._rng.choice(SYLLABLES) for _ in range(num_syllables)).capitalize()
            if num_syllables < 3:
                return word  # there are few, and none of them is a whole name
            if word not in self._long_words:
                self._long_words.add(word)
                return word

    def _unique(self, draw: Callable[[], str]) -> str:
        for _ in range(1000):
            name = draw()
            if name not in self._taken:
                self._taken.add(name)
                return name
        raise AssertionError("a thousand draws gave no new name: the world is too large")

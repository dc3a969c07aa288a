"""Invented names, made of few pieces, unique within a world, with near-namesakes.

No name is a word of another one: a town is never called like the first word of a company.
Few shared pieces are what lets a model of a million parameters copy a name it has never seen: a
small byte-level BPE learns each piece as one token, every piece is common even when the name is
new, and the first piece of a name tells it from most others on a page.
"""

from __future__ import annotations

import random
from collections.abc import Callable

BEGINNINGS = tuple(a + b + c for a in "bdfgkmnprstv" for b in "aeio" for c in "ln")
ENDINGS = tuple(a + b for a in "bdfgkmrstv" for b in "aeio")
PERSON_ENDINGS = (
    *("ard", "ash", "eth", "ick", "ina", "isa", "ith", "oph", "ora", "uno", "urt", "yra"),
    *("amy", "eka", "iel", "ost", "umi", "yan", "arc", "ebb", "igo", "oss", "une", "ywn"),
)
REGION_ENDINGS = ("land", "mark", "wick", "shire")

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
        self._given_words: set[str] = set()
        self._words: dict[str, list[str]] = {}

    def person(self) -> str:
        """Given name and surname; either may be shared with somebody else."""
        return self._unique(lambda: f"{self._person_word('given')} {self._person_word('surname')}")

    def town(self) -> str:
        return self._unique(self._fresh)

    def region(self) -> str:
        return self._unique(lambda: self._longer("", REGION_ENDINGS))

    def company(self) -> str:
        return self._unique(lambda: self._with(COMPANY_WORDS, "company"))

    def work(self) -> str:
        return self._unique(lambda: self._with(WORK_WORDS, "work"))

    def event(self) -> str:
        return self._unique(lambda: self._with(EVENT_WORDS, "event"))

    def _with(self, words: tuple[str, ...], kind: str) -> str:
        return f"{self._word(kind, self._fresh)} {self._rng.choice(words)}"

    def _person_word(self, pool: str) -> str:
        return self._word(pool, lambda: self._joined(PERSON_ENDINGS))

    def _word(self, pool: str, draw: Callable[[], str]) -> str:
        words = self._words.setdefault(pool, [])
        if words and self._rng.random() < NAMESAKE_SHARE:
            return self._rng.choice(words)
        words.append(draw())
        return words[-1]

    def _fresh(self) -> str:
        """A word that is given only once."""
        word = self._longer(self._rng.choice(ENDINGS), ENDINGS)
        self._given_words.add(word)
        return word

    def _longer(self, middle: str, endings: tuple[str, ...]) -> str:
        """A beginning and an ending, with pieces between them where all shorter words are gone."""
        for _ in range(50):
            word = self._rng.choice(BEGINNINGS).capitalize() + middle + self._rng.choice(endings)
            if word not in self._given_words and word not in self._taken:
                return word
        return self._longer(middle + self._rng.choice(ENDINGS), endings)

    def _joined(self, endings: tuple[str, ...]) -> str:
        return self._rng.choice(BEGINNINGS).capitalize() + self._rng.choice(endings)

    def _unique(self, draw: Callable[[], str]) -> str:
        for _ in range(1000):
            name = draw()
            if name not in self._taken:
                self._taken.add(name)
                return name
        raise AssertionError("a thousand draws gave no new name: the world is too large")

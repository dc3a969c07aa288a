"""The language of the generated encyclopedia: invented names, and templates for its sentences.

Names are built from few pieces, so that a model of a million parameters can copy a name it has
never seen: a small byte-level BPE learns each piece as one token, every piece is common even if the
name is new, and the first piece of a name distinguishes it from most others on a page. No name is a
word of another one: a town never shares its name with the first word of a company.

Every kind of sentence has several wordings, so that a fact is found by reading and not by position.
An article calls a relation by the noun that ``ASK`` and ``REFER`` are keyed by; most questions do
not. ``encyclopedia.py`` decides which facts exist.
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


OCCUPATIONS = (
    "baker", "potter", "weaver", "miller", "tailor", "painter", "sailor", "farmer", "lawyer",
    "singer", "banker", "carver", "printer", "poet", "doctor", "pilot", "mason", "dancer",
    "hunter", "fisher", "barber", "teacher", "judge", "clerk",
)  # fmt: skip

PRODUCTS = (
    "salt", "silk", "honey", "cheese", "bells", "paper", "pears", "amber", "clocks", "lamps",
    "boats", "tea", "linen", "copper", "marble", "apples", "mirrors", "candles", "pepper",
    "horses", "ink", "gloves", "masks", "soap",
)  # fmt: skip

GENRES = ("novel", "poem", "play", "ballad")
TRADES = ("paper", "trading", "shipping", "mining")

ARTICLES: dict[str, tuple[str, ...]] = {
    "person": (
        "{name} had the occupation {occupation} and the birthplace {birthplace}.",
        "{name} left the birthplace {birthplace} for the occupation {occupation}.",
        "Of {name} we know the birthplace {birthplace} and the occupation {occupation}.",
        "With the occupation {occupation}, {name} came from the birthplace {birthplace}.",
    ),
    "town": (
        "Proud of its product {product}, {name} is a town of the region {region}.",
        "The town {name} sells its product {product} all over the region {region}.",
        "{name} lies in the region {region} and lives off the product {product}.",
    ),
    "region": (
        "{name} is wide; its largest town is {capital}.",
        "The largest town in {name} is {capital}.",
    ),
    "company": (
        "{name} is a {trade} company with the founder {founder} and the seat {seat}.",
        "{name} never left its seat {seat}, nor did the founder {founder}.",
        "The founder {founder} gave {name} its seat {seat}.",
    ),
    "work": (
        "{name} is a {genre} by the author {author}.",
        "{name} made its author {author} known in {year}.",
        "In {year} the author {author} finished {name}.",
    ),
    "event": (
        "{name} was held in {year} at the venue {venue}.",
        "The venue {venue} is still proud of {name}.",
        "{name} filled its venue {venue} in {year}.",
    ),
}

FILLERS: dict[str, tuple[str, ...]] = {
    "person": (
        "{name} travelled with {other}.",
        "{other} was a friend.",
        "A street bears the name.",
    ),
    "town": (
        "The road to {other} starts here.",
        "A bridge was built in {year}.",
        "It has a market.",
    ),
    "region": ("It is dry in summer.", "It borders {other}."),
    "company": ("It competes with {other}.", "It opened in {year}."),
    "work": ("It is often compared with {other}.", "Critics were kind."),
    "event": ("Few people came.", "It was planned like {other}."),
}
FILLER_SHARE = 0.4

ASK: dict[str, tuple[str, ...]] = {
    "birthplace": ("Where was {x} born?", "What is the birthplace of {x}?"),
    "occupation": ("What was the occupation of {x}?", "What did {x} work as?"),
    "founder": ("Who founded {x}?", "Who is the founder of {x}?"),
    "seat": ("Where is {x} based?", "In which town is {x} based?"),
    "author": ("Who wrote {x}?", "Who is the author of {x}?"),
    "venue": ("Where was {x} held?", "Which town hosted {x}?"),
    "region": ("In which region is {x}?", "Which region is {x} in?"),
    "product": ("What is {x} known for?", "What does {x} make?"),
}

REFER: dict[str, tuple[str, ...]] = {
    "birthplace": ("the birthplace of {x}", "the town where {x} was born"),
    "founder": ("the founder of {x}", "the person who founded {x}"),
    "seat": ("the seat of {x}", "the town where {x} is based"),
    "author": ("the author of {x}", "the person who wrote {x}"),
    "venue": ("the town that hosted {x}", "the town where {x} was held"),
}

"""Pairs of passages from different documents that share an entity.

A passage that mentions another one's title leads to it; passages that name the same rare entity are
neighbours. Each passage is read once and each entity gives at most as many pairs as it has
passages, so the cost grows with the corpus and not with its square.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forage.questions.candidate import document_of
from forage.questions.text_checks import names_in, without_instructions, words_of
from forage.types import Passage

_MAX_PASSAGES_OF_NAME = 12
"""A name in more passages says too little about what they have in common."""
_MAX_TITLE_WORDS = 6
_MIN_NAME_LETTERS = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """Two passages that share ``bridge``; if ``is_directed``, the second one is about it."""

    first: Passage
    second: Passage
    bridge: str
    is_directed: bool


@dataclass(frozen=True, slots=True)
class Links:
    """The pairs of a corpus; ``num_steps`` counts the names and words that were looked up."""

    pairs: tuple[Pair, ...]
    num_steps: int


def link(passages: Sequence[Passage], rng: random.Random) -> Links:
    """Links passages of different documents through titles and rare names."""
    titled = _by_title(passages)
    longest = max((len(key.split()) for key in titled), default=0)
    by_name: dict[str, list[Passage]] = {}
    pairs: list[Pair] = []
    num_steps = 0
    for passage in passages:
        text, _ = without_instructions(passage.text)
        words = words_of(text)
        num_steps += len(words)
        pairs += _mentions(passage, words, titled, longest)
        for name in dict.fromkeys(names_in(text)):
            num_steps += 1
            if len(name) >= _MIN_NAME_LETTERS and " ".join(words_of(name)) not in titled:
                by_name.setdefault(name, []).append(passage)
    for name, sharing in by_name.items():
        if 2 <= len(sharing) <= _MAX_PASSAGES_OF_NAME:
            num_steps += len(sharing)
            pairs += _neighbours(name, sharing, rng)
    rng.shuffle(pairs)
    return Links(tuple(pairs), num_steps)


def _by_title(passages: Sequence[Passage]) -> dict[str, Passage]:
    """The first passage with each title, unless several documents have that title."""
    found: dict[str, Passage] = {}
    ambiguous: set[str] = set()
    for passage in passages:
        key = " ".join(words_of(passage.title))
        if key and len(key.split()) <= _MAX_TITLE_WORDS:
            first = found.setdefault(key, passage)
            if document_of(first) != document_of(passage):
                ambiguous.add(key)
    return {key: passage for key, passage in found.items() if key not in ambiguous}


def _mentions(
    passage: Passage, words: Sequence[str], titled: Mapping[str, Passage], longest: int
) -> list[Pair]:
    """A pair for each title of another document that occurs in the passage's words."""
    found: dict[str, Pair] = {}
    for start in range(len(words)):
        for length in range(1, longest + 1):
            key = " ".join(words[start : start + length])
            target = titled.get(key)
            if target is not None and document_of(target) != document_of(passage):
                found.setdefault(key, Pair(passage, target, target.title, is_directed=True))
    return list(found.values())


def _neighbours(name: str, sharing: Sequence[Passage], rng: random.Random) -> list[Pair]:
    """Pairs each passage that names an entity with the next one, in random order."""
    order = rng.sample(list(sharing), len(sharing))
    return [
        Pair(one, other, name, is_directed=False)
        for one, other in pairwise(order)
        if document_of(one) != document_of(other)
    ]

"""Demonstrations for a warm start: scripted turns, played through the real environment.

They show the protocol and how to read, and many of them choose badly on purpose: no search, a
search for something else, or an answer after too few hops. What to search and when to stop is
left for reinforcement learning to find. Only questions that carry their hops can be shown.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from forage.environment import actions
from forage.environment.codec import Codec
from forage.types import Completion, EngineError, FinishReason, Hop, Question, Sampling


class Choice(StrEnum):
    """What a demonstration decides to do."""

    GOOD = "good"
    NO_SEARCH = "no_search"
    OTHER_SEARCH = "other_search"
    STOP_EARLY = "stop_early"


@dataclass(frozen=True, slots=True)
class Script:
    """The turns of one demonstration, as text."""

    choice: Choice
    turns: tuple[str, ...]


class ScriptWriter:
    """Writes scripts; wrong guesses and searches are drawn from the other questions' hops."""

    def __init__(self, questions: Sequence[Question], poor_share: float) -> None:
        hops = [hop for question in questions for hop in question.hops]
        self._poor_share = poor_share
        self._subjects = [hop.subject for hop in hops]
        self._values: dict[str, list[str]] = {}
        for hop in hops:
            self._values.setdefault(hop.relation, []).append(hop.value)

    def write(self, question: Question, rng: random.Random) -> Script:
        """A script for ``question``; poor with probability ``poor_share``."""
        choice = Choice.GOOD
        if rng.random() < self._poor_share:
            poor = [Choice.NO_SEARCH, Choice.OTHER_SEARCH]
            if len(question.hops) > 1:
                poor.append(Choice.STOP_EARLY)
            choice = rng.choice(poor)
        hops = question.hops
        assert hops, "only questions that carry their hops can be shown"
        last = hops[-1]
        guess = rng.choice(self._values[last.relation])
        match choice:
            case Choice.GOOD:
                turns = [*_searches(hops), _answer(last.relation, last.value)]
            case Choice.NO_SEARCH:
                turns = [_answer(last.relation, guess)]
            case Choice.OTHER_SEARCH:
                subject = rng.choice(self._subjects)
                turns = [_search(_find(hops[0]), subject), _answer(last.relation, guess)]
            case Choice.STOP_EARLY:
                turns = [*_searches(hops)[:-1], _answer(last.relation, guess)]
        return Script(choice, tuple(turns))


class Demonstrator:
    """An engine that says what the script says; one for each episode."""

    def __init__(self, script: Script, codec: Codec) -> None:
        self._turns = iter(script.turns)
        self._codec = codec

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The next turn of the script; raises ``EngineError`` after the last or if it is cut."""
        text = next(self._turns, None)
        if text is None:
            raise EngineError("the script is over and the episode is not")
        ids = tuple(self._codec.encode_trusted(text))
        if len(ids) > sampling.max_tokens:
            raise EngineError(f"a scripted turn of {len(ids)} tokens exceeds {sampling.max_tokens}")
        zeros = (0.0,) * len(ids)
        return Completion(ids, zeros, (0,) * len(ids), FinishReason.STOP)

    def release(self, episode_key: str) -> None:
        """Nothing is kept."""


def _searches(hops: Sequence[Hop]) -> list[str]:
    turns = [_search(_find(hops[0]), hops[0].subject)]
    for known, hop in pairwise(hops):
        turns.append(_search(f"The {known.relation} is {known.value}. {_find(hop)}", hop.subject))
    return turns


def _find(hop: Hop) -> str:
    return f"Find the {hop.relation}."


def _search(thought: str, query: str) -> str:
    return (
        f"{actions.THINK_OPEN}{thought}{actions.THINK_CLOSE}"
        f"{actions.SEARCH_OPEN}{query}{actions.SEARCH_CLOSE}"
    )


def _answer(relation: str, value: str) -> str:
    return (
        f"{actions.THINK_OPEN}The {relation} is {value}.{actions.THINK_CLOSE}"
        f"{actions.ANSWER_OPEN}{value}{actions.ANSWER_CLOSE}"
    )

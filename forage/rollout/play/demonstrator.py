"""Demonstrations for a warm start: scripted turns, played through the real environment.

They show the protocol and how to read, and many of them choose badly on purpose: no search, a
search for the kind of thing instead of its name, or an answer one hop too early. What to search
and when to stop is left for reinforcement learning to find. Only questions that carry their hops
can be shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from forage.environment import actions
from forage.environment.codec import Codec
from forage.types import (
    Completion,
    EngineError,
    FinishReason,
    Hop,
    Question,
    Retriever,
    Sampling,
    SearchReply,
)

_UNKNOWN = (
    f"{actions.THINK_OPEN} Found nothing.{actions.THINK_CLOSE}"
    f"{actions.ANSWER_OPEN} unknown{actions.ANSWER_CLOSE}"
)


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
    """Writes scripts; guesses are drawn from all hops, searches spelt by ``write_search``."""

    def __init__(
        self, questions: Sequence[Question], poor_share: float, write_search: Callable[[str], str]
    ) -> None:
        self._hops = [hop for question in questions for hop in question.hops]
        self._poor_share = poor_share
        self._write_search = write_search

    def write(self, question: Question, rng: random.Random) -> Script:
        """A script for ``question``; poor with probability ``poor_share``."""
        hops = list(question.hops)
        assert hops, "only questions that carry their hops can be shown"
        choice = Choice.GOOD
        if rng.random() < self._poor_share:
            poor = [Choice.NO_SEARCH, Choice.OTHER_SEARCH]
            # Stopping early is shown most: it reads well, and only the decision is wrong.
            poor += [Choice.STOP_EARLY] * 4 if len(hops) > 1 else []
            choice = rng.choice(poor)
        other = rng.choice(self._hops)
        match choice:
            case Choice.GOOD:
                turns = [*self._searches(hops), _answer(hops[-1], hops[-1].relation)]
                if (answer := question.golden_answers[0]) != hops[-1].value:  # it is concluded
                    turns[-1] = _conclude(hops, answer)
            case Choice.NO_SEARCH:
                turns = [_answer(replace(hops[-1], value=other.value), hops[-1].relation)]
            case Choice.OTHER_SEARCH:
                # Every name is one that can be copied: an arbitrary one would teach bad copying.
                wanted = hops[-1].relation
                thought = f"Want the {wanted}. Find the {wanted}."
                turns = [self._search(thought, wanted), _UNKNOWN]
            case Choice.STOP_EARLY:
                turns = [*self._searches(hops)[:-1], _answer(hops[-2], hops[-1].relation)]
        return Script(choice, tuple(turns))

    def _searches(self, hops: Sequence[Hop]) -> list[str]:
        wanted = hops[-1].relation
        first = f"Want the {wanted}. Find the {hops[0].relation}."
        turns = [self._search(first, hops[0].subject)]
        for known, hop in pairwise(hops):
            thought = f"{_found(known, wanted)} Find the {hop.relation}."
            turns.append(self._search(thought, hop.subject))
        return turns

    def _search(self, thought: str, query: str) -> str:
        thinking = f"{actions.THINK_OPEN} {thought}{actions.THINK_CLOSE}"
        return f"{thinking}{self._write_search(query)}"


@dataclass(frozen=True, slots=True)
class FirstHit:
    """A search that shows the best passage alone: short pages teach reading sooner."""

    search_all: Retriever

    async def search(self, query: str) -> SearchReply:
        reply = await self.search_all.search(query)
        return replace(reply, hits_K=reply.hits_K[:1])


class Demonstrator:
    """An engine that writes the turns of a script; one for each episode."""

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


def _found(known: Hop, wanted: str) -> str:
    """What was found beside what is wanted, so that the text shows whether to go on."""
    return f"Found the {known.relation} {known.value}. Want the {wanted}."


def _conclude(hops: Sequence[Hop], answer: str) -> str:
    """An answer that compares what was found about several things."""
    found = " ".join(f"{hop.subject} has the {hop.relation} {hop.value}." for hop in hops)
    return (
        f"{actions.THINK_OPEN} {found}{actions.THINK_CLOSE}"
        f"{actions.ANSWER_OPEN} {answer}{actions.ANSWER_CLOSE}"
    )


def _answer(known: Hop, wanted: str) -> str:
    return (
        f"{actions.THINK_OPEN} {_found(known, wanted)}{actions.THINK_CLOSE}"
        f"{actions.ANSWER_OPEN} {known.value}{actions.ANSWER_CLOSE}"
    )

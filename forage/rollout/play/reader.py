"""Demonstrations for questions that carry nothing but their answers: search, read, answer.

Unlike a script (``demonstrator.py``), it looks at what its search found: it answers with a golden
answer only if an observation shows one, so that nobody learns to answer what was not read. The
first search is the question or its key words; where that finds nothing, the other is tried. Poor
demonstrations guess without a search, or search for a single word.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forage.environment import actions
from forage.environment.codec import Codec
from forage.types import Completion, EngineError, FinishReason, Question, Sampling

_LOOK_UP = "I have to look this up."
_FOUND = "This is in the results."
_TRY_AGAIN = "The results do not say it. I search for the key words."
_GUESS = "I know this."
_UNKNOWN = "unknown"
_WORD = re.compile(r"\w[\w'’-]*")


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """What one demonstration does: its searches in turn, and a guess where it does not search."""

    queries: tuple[str, ...]
    guess: str = ""
    admits_failure: bool = False
    """Whether it answers "unknown" where nothing was found; otherwise it shows nothing."""


def plan_reading(
    question: Question,
    others: Sequence[Question],
    poor_share: float,
    keyword_share: float,
    key_words: Callable[[str], str],
    rng: random.Random,
) -> ReadingPlan:
    """Draw a demonstration of ``question``; ``others`` lend their answers to guesses."""
    short = key_words(question.text) or question.text
    if rng.random() < poor_share:
        if rng.random() < 0.5:
            return ReadingPlan((), guess=rng.choice(rng.choice(others).golden_answers))
        return ReadingPlan((rng.choice(short.split()),), admits_failure=True)
    queries = (short, question.text) if rng.random() < keyword_share else (question.text, short)
    return ReadingPlan(queries)


def words_without(stop_words: Sequence[str]) -> Callable[[str], str]:
    """A function that leaves ``stop_words`` out of a text.

    >>> words_without(["who", "the"])("Who wrote the Iliad?")
    'wrote Iliad'
    """
    left_out = frozenset(stop_words)

    def key_words(text: str) -> str:
        return " ".join(word for word in _WORD.findall(text) if word.lower() not in left_out)

    return key_words


class Reader:
    """An engine that plays one question as its plan says; one for each episode."""

    def __init__(
        self,
        question: Question,
        plan: ReadingPlan,
        codec: Codec,
        write_search: Callable[[str], str],
    ) -> None:
        self._question, self._plan = question, plan
        self._codec, self._write_search = codec, write_search
        self._num_searches = 0
        self._num_seen = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The next turn; raises ``EngineError`` where nothing good can be shown any more."""
        observed = self._codec.decode(token_ids[self._num_seen :]) if self._num_seen else ""
        ids = tuple(self._codec.encode_trusted(self._next_turn(observed)))
        if len(ids) > sampling.max_tokens:
            raise EngineError(f"a turn of {len(ids)} tokens exceeds {sampling.max_tokens}")
        self._num_seen = len(token_ids) + len(ids)
        zeros = (0.0,) * len(ids)
        return Completion(ids, zeros, (0,) * len(ids), FinishReason.STOP)

    def release(self, episode_key: str) -> None:
        """Nothing is kept."""

    def _next_turn(self, observed: str) -> str:
        plan = self._plan
        if plan.guess:
            return _answer(_GUESS, plan.guess)
        if (found := shown_answer(observed, self._question.golden_answers)) is not None:
            return _answer(_FOUND, found)
        if self._num_searches == len(plan.queries):
            if plan.admits_failure:
                return _answer(_TRY_AGAIN.partition(".")[0] + ".", _UNKNOWN)
            raise EngineError("no search found the answer")
        thought = _TRY_AGAIN if self._num_searches else _LOOK_UP
        query = plan.queries[self._num_searches]
        self._num_searches += 1
        return f"{_thought(thought)}{self._write_search(query)}"


def shown_answer(text: str, golden_answers: Sequence[str]) -> str | None:
    """The first golden answer that stands in ``text`` as whole words, spelt as it is there."""
    for answer in golden_answers:
        match = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE)
        if match is not None:
            return match[0]
    return None


def _thought(text: str) -> str:
    return f"{actions.THINK_OPEN} {text}{actions.THINK_CLOSE}"


def _answer(thought: str, text: str) -> str:
    return f"{_thought(thought)}{actions.ANSWER_OPEN} {text}{actions.ANSWER_CLOSE}"

"""The conditions of an evaluation: what a question's searches are answered with.

Each arm is a ``Retriever`` that stands in for the retriever, built for one question; the
environment and the policy do not know which arm they are in. An arm changes what is returned, never
the prompt. Nothing here plays or scores.

======================  =======================================================================
``normal``              what the retriever finds
``closed_book``         nothing is searched: the observation says that there is no search here and
                        asks for an answer from memory. What the policy knows, or guesses
``empty``               the search works and finds nothing, each time. What the policy makes of a
                        retriever without the answer: another query, or something made up
``gold``                the question's gold passages, whatever the query. Reading alone
``random``              passages drawn at random. What chance gives
``other_retriever``     what another retriever finds (``evaluation.other_search``)
======================  =======================================================================
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forage.config.evaluation_config import Arm
from forage.errors import UserError
from forage.types import Hit, Passage, Question, Retriever, SearchReply


class Passages(Protocol):
    """What the arms need of a corpus: its passages by row and by id."""

    def __len__(self) -> int: ...

    def passage(self, row: int, /) -> Passage: ...

    def by_id(self, identity: str, /) -> Passage | None: ...


@dataclass(frozen=True, slots=True)
class FixedReply:
    """Every search gets the same reply, whatever the query."""

    reply: SearchReply

    async def search(self, query: str) -> SearchReply:
        return self.reply


@dataclass(frozen=True, slots=True)
class RandomSearch:
    """Every search returns ``topk`` passages drawn by (seed, question id, query) alone."""

    question_id: str
    passages: Passages
    topk: int
    seed: int

    async def search(self, query: str) -> SearchReply:
        key = "\0".join((str(self.seed), self.question_id, query)).encode("utf-8", "surrogatepass")
        draw = random.Random(hashlib.sha256(key).digest())
        rows = draw.sample(range(len(self.passages)), min(self.topk, len(self.passages)))
        return SearchReply(tuple(Hit(self.passages.passage(row), 0.0) for row in rows))


@dataclass(frozen=True, slots=True)
class Searches:
    """Makes the search of each arm: of the retriever, another one, the corpus of ``data.index``."""

    normal: Retriever
    other: Retriever | None
    passages: Passages | None
    topk: int
    seed: int

    def of(self, arm: Arm, question: Question) -> Retriever:
        """The search that ``question`` meets under ``arm``; raises ``UserError``."""
        match arm:
            case "normal":
                return self.normal
            case "closed_book":
                return FixedReply(SearchReply(is_switched_off=True))
            case "empty":
                return FixedReply(SearchReply())
            case "gold":
                gold = _gold_passages(question, self._corpus(arm))
                return FixedReply(SearchReply(tuple(Hit(passage, 1.0) for passage in gold)))
            case "random":
                return RandomSearch(question.id, self._corpus(arm), self.topk, self.seed)
            case "other_retriever":
                assert self.other is not None, "the config asks for other_search with this arm"
                return self.other

    def check(self, arms: Sequence[Arm], questions: Sequence[Question]) -> None:
        """Refuse arms that cannot be played, before the first episode; raises ``UserError``."""
        if "random" in arms:
            self._corpus("random")
        if "gold" not in arms:
            return
        without = [question for question in questions if not question.gold_passage_ids]
        if without:
            raise UserError(
                f"{len(without)} of {len(questions)} questions name no gold passages (the first is "
                f"{without[0].id}), which the arm gold needs: remove gold from evaluation.arms, or "
                "use questions that have gold_passage_ids"
            )
        for question in questions:
            _gold_passages(question, self._corpus("gold"))

    def _corpus(self, arm: Arm) -> Passages:
        if self.passages is None:
            raise UserError(
                f"the arm {arm} needs the corpus: set data.index to a directory of `forage index`"
            )
        return self.passages


def _gold_passages(question: Question, passages: Passages) -> tuple[Passage, ...]:
    found: list[Passage] = []
    for passage_id in question.gold_passage_ids:
        passage = passages.by_id(passage_id)
        if passage is None:
            raise UserError(
                f"gold passage {passage_id} of question {question.id} is not in the corpus: "
                "the questions and the corpus do not belong together"
            )
        found.append(passage)
    return tuple(found)

"""The conditions of an evaluation: what a question's searches are answered with.

Each arm is a ``Search`` that stands in for the retriever, built for one question; the environment
and the policy do not know which arm they are in. An arm changes what is returned, never the
prompt. Nothing here plays or scores.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Literal, Protocol

from forage.errors import UserError
from forage.types import Hit, Passage, Question, Search, SearchReply

Arm = Literal["normal", "closed_book", "gold", "random"]


class Passages(Protocol):
    """What the arms need of a corpus: its passages by row and by id."""

    def __len__(self) -> int: ...

    def passage(self, row: int, /) -> Passage: ...

    def by_id(self, identity: str, /) -> Passage | None: ...


@dataclass(frozen=True, slots=True)
class ClosedBookSearch:
    """Every search succeeds and finds nothing: what is answered was known, or guessed."""

    async def search(self, query: str) -> SearchReply:
        return SearchReply()


@dataclass(frozen=True, slots=True)
class GoldSearch:
    """Every search returns the question's gold passages, whatever the query: reading alone."""

    passages_K: tuple[Passage, ...]

    async def search(self, query: str) -> SearchReply:
        return SearchReply(tuple(Hit(passage, 1.0) for passage in self.passages_K))


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


def search_for_arm(
    arm: Arm, question: Question, base: Search, passages: Passages, topk: int, seed: int
) -> Search:
    """The search that ``question`` meets under ``arm``; raises ``UserError``."""
    match arm:
        case "normal":
            return base
        case "closed_book":
            return ClosedBookSearch()
        case "gold":
            return GoldSearch(_gold_passages(question, passages))
        case "random":
            return RandomSearch(question.id, passages, topk, seed)


def _gold_passages(question: Question, passages: Passages) -> tuple[Passage, ...]:
    if not question.gold_passage_ids:
        raise UserError(
            f"question {question.id} names no gold passages, which the arm gold needs: "
            "remove gold from evaluation.arms, or use questions that have gold_passage_ids"
        )
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

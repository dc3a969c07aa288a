"""What a question's searches are answered with under each arm."""

import pytest

from forage.errors import UserError
from forage.evaluation.arms import RandomSearch, search_for_arm
from forage.types import Hit, Passage, Question, SearchReply

QUESTION = Question("q7", "Where?", ("Oslo",), "world", gold_passage_ids=("p3", "p1"))


class Corpus:
    def __init__(self, size: int) -> None:
        self._passages = [Passage(f"p{n}", f"Title {n}", f"Text {n}") for n in range(size)]

    def __len__(self) -> int:
        return len(self._passages)

    def passage(self, row: int, /) -> Passage:
        return self._passages[row]

    def by_id(self, identity: str, /) -> Passage | None:
        return {passage.id: passage for passage in self._passages}.get(identity)


class Base:
    async def search(self, query: str) -> SearchReply:
        return SearchReply((Hit(Passage("base", query, ""), 1.0),))


def ids(reply: SearchReply) -> list[str]:
    assert reply.failure is None
    return [hit.passage.id for hit in reply.hits_K]


async def test_the_normal_arm_is_the_retriever_itself() -> None:
    base = Base()
    assert search_for_arm("normal", QUESTION, base, Corpus(9), 3, 0) is base


async def test_a_closed_book_finds_nothing_and_does_not_fail() -> None:
    assert (
        ids(await search_for_arm("closed_book", QUESTION, Base(), Corpus(9), 3, 0).search("x"))
        == []
    )


async def test_the_gold_arm_returns_the_questions_passages_whatever_the_query() -> None:
    search = search_for_arm("gold", QUESTION, Base(), Corpus(9), 1, 0)
    assert ids(await search.search("x")) == ids(await search.search("y")) == ["p3", "p1"]


async def test_random_passages_depend_on_seed_question_and_query_alone() -> None:
    def search(question_id: str = "q7", seed: int = 0) -> RandomSearch:
        return RandomSearch(question_id, Corpus(500), 3, seed)

    first = search()
    await first.search("another query in between")
    drawn = ids(await first.search("x"))
    assert drawn == ids(await search().search("x"))
    assert len(set(drawn)) == 3
    assert drawn != ids(await search().search("y"))
    assert drawn != ids(await search(seed=1).search("x"))
    assert drawn != ids(await search(question_id="q8").search("x"))


async def test_random_passages_cover_the_corpus_evenly() -> None:
    search = RandomSearch("q7", Corpus(10), 2, 0)
    drawn = [pid for n in range(1000) for pid in ids(await search.search(f"query {n}"))]
    assert {drawn.count(f"p{n}") > 150 for n in range(10)} == {True}


async def test_a_corpus_smaller_than_topk_gives_all_it_has() -> None:
    search = search_for_arm("random", QUESTION, Base(), Corpus(2), 3, 0)
    assert sorted(ids(await search.search("x"))) == ["p0", "p1"]


async def test_a_query_that_no_encoding_holds_is_answered_too() -> None:
    search = search_for_arm("random", QUESTION, Base(), Corpus(9), 3, 0)
    assert len(ids(await search.search("\ud800"))) == 3


def test_a_question_without_gold_passages_has_no_gold_arm() -> None:
    bare = Question("q8", "Where?", ("Oslo",), "world")
    with pytest.raises(UserError, match=r"q8 names no gold passages.*evaluation\.arms"):
        search_for_arm("gold", bare, Base(), Corpus(9), 3, 0)


def test_a_gold_passage_outside_the_corpus_is_named() -> None:
    with pytest.raises(UserError, match="gold passage p3 of question q7 is not in the corpus"):
        search_for_arm("gold", QUESTION, Base(), Corpus(2), 3, 0)

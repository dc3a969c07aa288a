"""Search-R1's own client: all queries of a turn in one request, with scores; it reads contents."""

from tests.retrieval.clients.conftest import TOPK, Served, Session, contents_of
from tests.retrieval.clients.odd_queries import ODD_QUERIES


def observation(documents: list[dict]) -> str:
    """The passages as in its prompt: the first line of the contents is the title."""
    shown = ""
    for number, found in enumerate(documents, start=1):
        title, *text = found["document"]["contents"].split("\n")
        shown += f"Doc {number}(Title: {title}) " + "\n".join(text) + "\n"
    return shown


def expected(ids: list[str]) -> str:
    return observation([{"document": {"contents": contents_of(identity)}} for identity in ids])


async def test_a_turn_of_odd_queries_is_answered_in_order(session: Session, served: Served):
    asked = {"queries": list(ODD_QUERIES), "topk": TOPK, "return_scores": True}
    results = await session.post("/retrieve", asked)
    shown = [observation(found) for found in results]
    assert shown == [expected(served.found[query]) for query in ODD_QUERIES]
    assert sum(map(bool, shown)) > len(ODD_QUERIES) / 3
    scores = [[found["score"] for found in documents] for documents in results]
    assert all(row == sorted(row, reverse=True) for row in scores)


async def test_a_whole_rollout_travels_in_one_request(session: Session, served: Served):
    """512 questions, 5 samples: its own recipe, which failed on our 413 at 1,024 queries."""
    queries = [f"{query[:300]} {number}" for number in range(50) for query in ODD_QUERIES][:2560]
    queries[::5] = ["first compiler"] * 512
    asked = {"queries": queries, "topk": TOPK, "return_scores": True}
    results = await session.post("/retrieve", asked)
    assert len(results) == 2560
    assert all(found == results[0] for found in results[::5])
    assert len(results[0]) == TOPK
    again = await session.post("/retrieve", asked | {"queries": queries[2555:]})
    assert [observation(found) for found in again] == [observation(f) for f in results[2555:]]


async def test_a_request_without_queries_has_no_results(session: Session):
    assert await session.post("/retrieve", {"queries": [], "return_scores": True}) == []

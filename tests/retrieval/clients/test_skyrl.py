"""SkyRL's search environment: a single ``query``, with scores; it reads contents."""

import pytest

from tests.retrieval.clients.conftest import TOPK, Served, Session, contents_of
from tests.retrieval.clients.odd_queries import ODD_QUERIES


def observation(results: list[list[dict]]) -> str:
    """One block per list of passages; a single query has one."""
    return "\n---\n".join(
        "".join(
            f"Doc {number}: {found['document']['contents'].strip()}\n"
            for number, found in enumerate(documents, start=1)
        )
        for documents in results
    )


async def test_a_single_query_is_read(session: Session, served: Served):
    for query in ODD_QUERIES:
        asked = {"query": query, "topk": TOPK, "return_scores": True}
        results = await session.post("/retrieve", asked)
        expected = [{"document": {"contents": contents_of(i)}} for i in served.found[query]]
        assert observation(results) == observation([expected])


@pytest.mark.parametrize("topk", [{}, {"topk": None}, {"topk": 0}])
async def test_a_missing_topk_is_the_servers(session: Session, topk: dict):
    [documents] = await session.post("/retrieve", {"query": "engine", **topk})
    assert len(documents) == TOPK


async def test_a_list_of_queries_is_read_as_before(session: Session, served: Served):
    """Its older releases send ``queries``; if both are given, the list applies."""
    asked = {"queries": list(ODD_QUERIES), "query": "engine", "return_scores": True}
    results = await session.post("/retrieve", asked)
    ids = [[found["document"]["id"] for found in documents] for documents in results]
    assert ids == [served.found[query] for query in ODD_QUERIES]

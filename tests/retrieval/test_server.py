import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any, cast

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forage.data.corpus import format_contents
from forage.retrieval.index import Index
from forage.retrieval.server import ServerLimits
from forage.types import Hit
from tests.retrieval.conftest import PASSAGES, StartServer


async def post(url: str, body: object, path: str = "/retrieve") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=data, headers=headers) as response,
    ):
        return response.status, await response.json()


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def document(row: int) -> dict[str, str]:
    return {"id": PASSAGES[row].id, "contents": format_contents(PASSAGES[row])}


async def test_with_scores_each_document_stands_beside_its_score(start_server: StartServer):
    url = start_server()
    queries = ["first compiler", "", "Zürich"]
    status, reply = await post(url, {"queries": queries, "topk": 1, "return_scores": True})
    assert status == 200
    [[compiler], nothing, [zurich]] = reply["result"]
    assert compiler == {"document": document(2), "score": compiler["score"]}
    assert zurich["document"] == document(3)
    assert compiler["score"] > 0
    assert nothing == []


async def test_without_scores_the_documents_stand_alone(start_server: StartServer):
    status, reply = await post(start_server(), {"queries": ["compiler", "Zürich"], "topk": 1})
    assert (status, reply) == (200, {"result": [[document(2)], [document(3)]]})


@pytest.mark.parametrize("num_queries", [0, 1, 2, 100])
@pytest.mark.parametrize("return_scores", [False, True])
async def test_any_number_of_queries_gets_as_many_results(
    start_server: StartServer, num_queries: int, return_scores: bool
):
    body = {"queries": ["engine"] * num_queries, "return_scores": return_scores}
    status, reply = await post(start_server(), body)
    assert status == 200
    assert [len(found) for found in reply["result"]] == [2] * num_queries


async def test_topk_is_three_unless_asked_and_may_pass_the_corpus_size(start_server: StartServer):
    url = start_server()
    query = "ada babbage hopper zürich"
    for topk, expected in ((None, 3), (1, 1), (1000, 4)):
        _, reply = await post(url, {"queries": [query], "topk": topk, "extra": "ignored"})
        assert len(reply["result"][0]) == expected


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        ({"queries": ["a"] * 5}, 413, "5 queries in one request; at most 4"),
        ({"queries": ["a"], "topk": 11}, 400, "topk is 11; at most 10"),
        ({"queries": ["a", "b" * 21]}, 413, "queries[1] has 21 characters; at most 20"),
        ({"queries": ["a"], "topk": 0}, 422, "body.topk: Input should be greater than"),
        ({"queries": "a"}, 422, "body.queries: Input should be a valid list"),
        ({"queries": [5]}, 422, "body.queries.0: Input should be a valid string"),
        ({}, 422, "body.queries: Field required"),
        (b'{"queries": [', 422, "JSON decode error"),
        (b"\xff\xfe", 422, "JSON decode error"),
        (b"x" * 3000, 413, "the body is larger than 2000 bytes"),
    ],
)
async def test_a_request_beyond_the_limits_is_told_which(
    start_server: StartServer, body: object, status: int, complaint: str
):
    url = start_server(ServerLimits(4, max_topk=10, max_query_chars=20, max_body_bytes=2000))
    found, reply = await post(url, body)
    assert (found, complaint in reply["detail"]) == (status, True), reply
    assert (await post(url, {"queries": ["engine"]}))[0] == 200


async def test_queries_of_control_characters_and_broken_unicode_are_answered(
    start_server: StartServer,
):
    body = b'{"queries": ["\\ud800 compiler", "\\u0000", "\\udfff\\ud800"], "topk": 1}'
    assert await post(start_server(), body) == (200, {"result": [[document(2)], [], []]})


class GatedIndex:
    """An index whose searches wait until they are let through."""

    def __init__(self, index: Index) -> None:
        self.manifest = index.manifest
        self.entered = threading.Event()
        self.gate = threading.Event()
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.entered.set()
        self.gate.wait()
        return self._index.search(queries, topk)


async def test_requests_beyond_those_in_flight_get_429_and_when_to_return(
    start_server: StartServer, index: Index
):
    gated = GatedIndex(index)
    url = start_server(ServerLimits(max_in_flight=2), served=cast(Index, gated))
    first = [asyncio.create_task(post(url, {"queries": [q]})) for q in ("compiler", "engine")]
    await asyncio.to_thread(gated.entered.wait)
    async with aiohttp.ClientSession() as session:
        while True:  # the second request may still be on its way
            async with session.get(f"{url}/metrics") as response:
                if "forage_in_flight_requests 2.0" in await response.text():
                    break
        async with session.post(f"{url}/retrieve", json={"queries": ["lake"]}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert "2 requests are in flight" in (await response.json())["detail"]
    gated.gate.set()
    assert [status for status, _ in await asyncio.gather(*first)] == [200, 200]
    assert (await post(url, {"queries": ["lake"]}))[0] == 200


async def test_concurrent_requests_each_get_their_own_results(start_server: StartServer):
    url = start_server()
    words = ["compiler", "Zürich", "Babbage", "Lovelace"]
    rows = [2, 3, 1, 0]
    bodies = [{"queries": [words[i % 4], words[(i + 1) % 4]], "topk": 1} for i in range(40)]
    replies = await asyncio.gather(*(post(url, body) for body in bodies))
    for i, (status, reply) in enumerate(replies):
        expected = [[document(rows[i % 4])], [document(rows[(i + 1) % 4])]]
        assert (status, reply["result"]) == (200, expected)


async def test_health_and_readiness_answer(start_server: StartServer):
    url = start_server()
    assert await get(f"{url}/healthz") == (200, '{"status":"ok"}')
    assert await get(f"{url}/readyz") == (200, '{"status":"ready","backend":"bm25","passages":5}')


async def test_access_without_pages_is_a_clear_refusal(start_server: StartServer):
    status, reply = await post(start_server(), {"urls": ["http://a"]}, "/access")
    assert status == 501
    assert "this server has no pages" in reply["detail"]


async def test_figures_are_prometheus_text_that_counts_what_happened(start_server: StartServer):
    url = start_server()
    for body in ({"queries": ["engine", "lake"]}, {"queries": ["engine"]}, {"queries": 1}):
        await post(url, body)
    await get(f"{url}/nowhere")
    _, text = await get(f"{url}/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["forage_requests_total", "/retrieve", "200"] == 2
    assert samples["forage_requests_total", "/retrieve", "422"] == 1
    assert samples["forage_requests_total", "other", "404"] == 1
    assert samples["forage_queries_total",] == 3
    assert samples["forage_cache_hits_total",] == 1
    assert samples["forage_searched_queries_total",] == 2
    assert samples["forage_retrieve_seconds_count",] == 2
    assert samples["forage_passages",] == 5
    assert samples["forage_in_flight_requests",] == 0


async def test_the_api_describes_both_reply_shapes(start_server: StartServer):
    _, text = await get(f"{start_server()}/openapi.json")
    schemas = json.loads(text)["components"]["schemas"]
    assert {"RetrieveRequest", "ScoredReply", "PlainReply", "Problem"} <= set(schemas)

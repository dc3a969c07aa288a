"""The OpenAPI document compared with the server: its promises, and random requests made from it."""

import json
from collections.abc import Sequence

import pytest
import schemathesis

# Imported now: parsed deep inside a test, Python 3.11 can miscount its recursion (SystemError).
import schemathesis.specs.openapi._hypothesis
from hypothesis import given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from forage.retrieval.index.index import Index
from forage.retrieval.serve.api_pages import describe_api
from forage.retrieval.serve.limits import Limits
from forage.retrieval.wire import Page
from tests.retrieval.conftest import StartServer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


class OnePage:
    def pages(self, urls: Sequence[str]) -> list[Page | None]:
        return [Page(url=url, contents="text") if "a" in url else None for url in urls]

    def close(self) -> None: ...


OPERATIONS = {
    "/retrieve": "POST",
    "/access": "POST",
    "/healthz": "GET",
    "/readyz": "GET",
    "/metrics": "GET",
}


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", OPERATIONS)
def test_no_request_made_from_our_description_breaks_the_server(
    start_server: StartServer, index: Index, path: str, mode: GenerationMode
):
    limits = Limits(max_queries=5, max_topk=10, max_query_chars=50, max_body_bytes=10_000)
    url = start_server(limits, index, OnePage())
    api = schemathesis.openapi.from_url(f"{url}/openapi.json")
    assert set(api) == set(OPERATIONS), "an operation that is described and not tried"
    operation = api[path][OPERATIONS[path]]
    if mode is GenerationMode.NEGATIVE and OPERATIONS[path] == "GET":
        return  # it takes no argument that could be wrong

    @given(operation.as_strategy(generation_mode=mode))
    @settings(max_examples=40, derandomize=True, deadline=None, database=None)
    def try_it(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    try_it()


def test_the_document_states_the_limits_in_force():
    limits = Limits(max_queries=7, max_topk=8, max_query_chars=9)
    schemas = describe_api(limits, has_token=False)["components"]["schemas"]
    queries = schemas["RetrieveRequest"]["properties"]["queries"]
    assert (queries["maxItems"], queries["items"]["maxLength"]) == (7, 9)
    assert '"maximum": 8' in json.dumps(schemas["RetrieveRequest"]["properties"]["topk"])
    assert schemas["AccessRequest"]["properties"]["urls"]["maxItems"] == 7


def test_the_token_is_described_where_it_is_needed():
    document = describe_api(Limits(), has_token=True)
    needed = {
        path
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if operation.get("security")
    }
    assert needed == {"/retrieve", "/access", "/metrics"}
    assert "securitySchemes" not in describe_api(Limits(), has_token=False)["components"]


def test_both_shapes_of_the_reply_are_described():
    document = describe_api(Limits(), has_token=False)
    reply = document["paths"]["/retrieve"]["post"]["responses"]["200"]
    shapes = reply["content"]["application/json"]["schema"]["anyOf"]
    assert [shape["$ref"].rpartition("/")[2] for shape in shapes] == ["ScoredReply", "PlainReply"]

"""The pages for people, in a real browser if there is one."""

import json
import re
import urllib.request
from pathlib import Path

import pytest

from forage.data.corpus import format_contents
from forage.retrieval.serve.api_pages import describe_api, docs_page, search_page
from forage.retrieval.serve.limits import Limits
from tests.retrieval.conftest import PASSAGES, StartServer
from tests.retrieval.fake_sources import GatedSource
from tests.viewer.browser import needs_chromium, visit


@needs_chromium
def test_a_query_in_the_address_is_searched_and_its_results_shown(
    start_server: StartServer, tmp_path: Path
):
    seen = visit(f"{start_server()}/?q=lake+compiler&k=2", tmp_path / "profile", script_ms=5000)
    assert seen.console == ()
    assert "2 passages, " in seen.dom
    assert "ms round trip" in seen.dom
    assert "5 passages, bm25" in seen.dom
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", seen.dom)
    assert sorted(titles) == ["Grace Hopper", "Zürich"]
    assert len(re.findall(r'class="score">\d+\.\d{3}<', seen.dom)) == 2
    assert "&lt;answer&gt;Ada&lt;/answer&gt;" in seen.dom.replace('<mark class="">', "")


@needs_chromium
def test_without_a_token_the_page_asks_for_one(start_server: StartServer, tmp_path: Path):
    seen = visit(f"{start_server(token='secret')}/?q=lake", tmp_path / "profile", script_ms=5000)
    assert "HTTP 401: this server requires a token" in seen.dom
    assert re.search(r'<form class="token" id="token-form">', seen.dom), "the field is hidden"


@needs_chromium
def test_a_source_that_fails_is_shown_and_not_taken_for_an_empty_result(
    start_server: StartServer, tmp_path: Path
):
    seen = visit(
        f"{start_server(source=GatedSource())}/?q=offline", tmp_path / "profile", script_ms=5000
    )
    assert "HTTP 503: the provider said no" in seen.dom
    assert "<li class" not in seen.dom
    assert ">Nothing found" not in seen.dom


@needs_chromium
def test_the_description_of_the_api_is_readable_without_scripts(
    start_server: StartServer, tmp_path: Path
):
    seen = visit(f"{start_server()}/docs", tmp_path / "profile", script_ms=5000)
    assert seen.console == ()
    for path in ("/retrieve", "/access", "/healthz", "/readyz", "/metrics"):
        assert path in seen.dom
    assert "array of string (at most 20000 characters) (at most 1024)" in seen.dom


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere_and_let_only_their_own_script_run(
    start_server: StartServer, path: str
):
    with urllib.request.urlopen(start_server() + path) as response:
        html, policy = response.read().decode(), response.headers["Content-Security-Policy"]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[^ ]+';", policy)


def test_the_commands_on_the_api_page_are_those_that_work(start_server: StartServer):
    url = start_server()
    page = docs_page(describe_api(Limits(), has_token=True), url)
    body = re.search(r"-d &#39;(\{.*?queries.*?\})&#39;", page)
    assert body is not None
    request = urllib.request.Request(
        f"{url}/retrieve",
        body[1].replace("&#34;", '"').encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        found = json.load(response)["result"][0]
    assert found[0]["document"]["contents"] == format_contents(PASSAGES[0])
    assert page.count("Authorization: Bearer $FORAGE_TOKEN") == 3


def test_the_search_page_is_the_same_for_everybody():
    assert search_page() is search_page()
    assert "innerHTML =" not in search_page()

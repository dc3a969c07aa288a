"""SerpAPI, which queries a configurable search engine."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from forage.remote.request import BadReply, HttpRequest, Shape
from forage.retrieval.web.providers.provider import (
    Item,
    ProviderPlan,
    WebResult,
    WebSettings,
    results_of,
)

SearchEngine = Literal["google", "google_light", "bing", "duckduckgo", "baidu", "yahoo", "yandex"]

# Each engine's parameters for the query and, if it has one, the number of results.
_ENGINE_PARAMETERS: dict[SearchEngine, tuple[str, str | None]] = {
    "google": ("q", "num"),
    "google_light": ("q", "num"),
    "bing": ("q", "count"),
    "duckduckgo": ("q", None),
    "baidu": ("q", "rn"),
    "yahoo": ("p", None),
    "yandex": ("text", None),
}


class SerpApi(WebSettings):
    """The settings of SerpAPI, including the search ``engine`` that it queries."""

    provider: ClassVar[str] = "serpapi"
    plan: ClassVar[ProviderPlan] = ProviderPlan(
        url="https://serpapi.com/search.json",
        key_variable="SERPAPI_API_KEY",
        usd_per_request=0.015,
        requests_per_s=5,
        max_results=100,
    )

    engine: SearchEngine = "google"

    def request(self, query: str, key: str) -> HttpRequest:
        query_name, count_name = _ENGINE_PARAMETERS[self.engine]
        params = {"engine": self.engine, query_name: query, "api_key": key}
        if count_name is not None:
            params[count_name] = str(self.num_results)
        return HttpRequest("GET", self.address, params=params)

    def read(self, reply: Any) -> list[WebResult]:
        """The results; a search that found nothing is a success with the field ``error``."""
        checked = _SerpApiReply.check(reply)
        if checked.search_metadata is None or checked.search_metadata.status != "Success":
            raise BadReply(checked.error or "no finished search in the reply")
        return results_of(checked.organic_results or [])[: self.num_results]


class _SerpApiMetadata(Shape):
    status: str = ""


class _SerpApiReply(Shape):
    search_metadata: _SerpApiMetadata | None = None
    organic_results: list[Item] | None = None
    error: str = ""

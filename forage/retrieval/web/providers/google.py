"""Google Custom Search. At most 10 results a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from forage.remote.request import BadReply, HttpRequest
from forage.retrieval.web.providers.provider import (
    Item,
    Provider,
    ProviderJson,
    ProviderPlan,
    WebResult,
    WebSettings,
    results_of,
)

_URL = "https://www.googleapis.com/customsearch/v1"


class GoogleSettings(WebSettings):
    """Google searches with an engine that its user has set up."""

    provider: ClassVar[str] = "google"
    plan: ClassVar[ProviderPlan] = ProviderPlan(
        key_variable="GOOGLE_API_KEY", usd_per_request=0.005, requests_per_s=1.5, max_results=10
    )
    engine_id: str = Field(min_length=1, description="the cx of your Programmable Search Engine")

    def open(self, key: str) -> GoogleCustomSearch:
        return GoogleCustomSearch(key, self.engine_id, self.num_results, self.url or _URL)


@dataclass(frozen=True, slots=True)
class GoogleCustomSearch(Provider):
    """A search of Google; ``engine_id`` is its ``cx``."""

    key: str = field(repr=False)
    engine_id: str
    num_results: int = 10
    url: str = _URL

    name: ClassVar[str] = "google"

    def request(self, query: str) -> HttpRequest:
        params = {"key": self.key, "cx": self.engine_id, "q": query, "num": str(self.num_results)}
        return HttpRequest("GET", self.url, params=params)

    def read(self, reply: Any) -> list[WebResult]:
        """The results; a search that found nothing has no ``items``."""
        checked = _GoogleReply.check(reply)
        if checked.error is not None:
            raise BadReply(checked.error.message, status=checked.error.code)
        if checked.kind != "customsearch#search" and checked.items is None:
            raise BadReply("no results in the reply")
        return results_of(checked.items or [])


class _GoogleError(ProviderJson):
    message: str = ""
    code: int | None = None


class _GoogleReply(ProviderJson):
    kind: str = ""
    items: list[Item] | None = None
    error: _GoogleError | None = None

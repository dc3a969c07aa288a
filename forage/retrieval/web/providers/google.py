"""Google Custom Search: at most 10 results per request."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from forage.remote.request import BadReply, HttpRequest, Shape
from forage.retrieval.web.providers.provider import (
    Item,
    ProviderPlan,
    WebResult,
    WebSettings,
    results_of,
)


class GoogleCustomSearch(WebSettings):
    """The settings of Google, with a search engine that the user has configured."""

    provider: ClassVar[str] = "google"
    plan: ClassVar[ProviderPlan] = ProviderPlan(
        url="https://www.googleapis.com/customsearch/v1",
        key_variable="GOOGLE_API_KEY",
        usd_per_request=0.005,
        requests_per_s=1.5,
        max_results=10,
    )

    engine_id: str = Field(min_length=1, description="the cx of your Programmable Search Engine")

    def request(self, query: str, key: str) -> HttpRequest:
        params = {"key": key, "cx": self.engine_id, "q": query, "num": str(self.num_results)}
        return HttpRequest("GET", self.address, params=params)

    def read(self, reply: Any) -> list[WebResult]:
        """The results; a search that found nothing has no ``items``."""
        checked = _GoogleReply.check(reply)
        if checked.error is not None:
            raise BadReply(checked.error.message, status=checked.error.code)
        if checked.kind != "customsearch#search" and checked.items is None:
            raise BadReply("no results in the reply")
        return results_of(checked.items or [])


class _GoogleError(Shape):
    message: str = ""
    code: int | None = None


class _GoogleReply(Shape):
    kind: str = ""
    items: list[Item] | None = None
    error: _GoogleError | None = None

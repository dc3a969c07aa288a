"""What the web search providers share: settings, results, and how replies are checked.

A provider is one file beside this one: a class of settings with ``request(query, key)``, what is
sent, and ``read(reply)``, its results. ``read`` tells results, nothing found and an error document
apart by what the provider documents, so that no error reads as an empty result.
``forage.retrieval.web.web_settings`` lists the providers; ``web_source`` sends, and keeps the key
out of what is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self
from urllib.parse import quote_plus

from pydantic import Field, model_validator

from forage.remote.request import Shape
from forage.settings import Frozen

# Brave refuses more than 400 characters or 50 words; Google reads 32 words, and takes requests of
# 2,048 bytes.
_MAX_QUERY_CHARS = 400
_MAX_QUERY_WORDS = 50
_MAX_QUERY_BYTES = 1500

_UNSENDABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # controls, lone surrogates


class PageSettings(Frozen):
    """How pages of the web are fetched and what of them becomes a passage.

    ``deadline_s`` is for all pages of one search together; ``passage_chars`` is the part of a page
    around its snippet. Finding the text of one page may take ``extraction_s`` on a processor and
    ``extraction_mb`` of memory.
    """

    deadline_s: float = Field(default=8.0, gt=0)
    max_bytes: int = Field(default=2 * 2**20, ge=1024)
    passage_chars: int = Field(default=2000, ge=100)
    max_concurrent: int = Field(default=32, ge=1)
    max_redirects: int = Field(default=5, ge=0)
    extraction_s: float = Field(default=4.0, gt=0)
    extraction_mb: int = Field(default=512, ge=256)


@dataclass(frozen=True, slots=True)
class ProviderPlan:
    """Where a provider is, where its key is looked for, and its smallest paid plan of 2025."""

    url: str
    key_variable: str
    usd_per_request: float
    requests_per_s: float
    max_results: int


class WebSettings(Frozen):
    """What is asked of any provider, how patiently, and for how much.

    ``url`` is another address that speaks the provider's API. ``requests_per_s`` and
    ``usd_per_request`` are those of the provider's ``plan`` unless given. ``ledger`` makes the cap
    outlive the process. Without ``max_retries`` a query is asked again until ``deadline_s``.
    """

    provider: ClassVar[str]
    plan: ClassVar[ProviderPlan]

    url: str | None = Field(default=None, pattern=r"^https?://")
    key_file: Path | None = None
    num_results: int = Field(default=10, ge=1)
    mode: Literal["snippets", "pages"] = "snippets"
    pages: PageSettings = PageSettings()
    timeout_s: float = Field(default=10.0, gt=0)
    deadline_s: float = Field(default=25.0, gt=0)
    max_retries: int | None = Field(default=None, ge=0)
    max_concurrent: int = Field(default=32, ge=1)
    requests_per_s: float | None = Field(default=None, gt=0)
    max_spend_usd: float = Field(default=10.0, ge=0)
    usd_per_request: float | None = Field(default=None, ge=0)
    ledger: Path | None = None
    cache_size: int = Field(default=10_000, ge=256)

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if self.num_results > self.plan.max_results:
            raise ValueError(
                f"num_results is {self.num_results}; {self.provider} gives at most "
                f"{self.plan.max_results} a request"
            )
        if self.mode == "snippets" and "pages" in self.model_fields_set:
            raise ValueError("pages.* is read with mode=pages alone; add it, or remove them")
        if self.deadline_s < self.timeout_s:
            raise ValueError(
                f"deadline_s ({self.deadline_s}) is shorter than timeout_s ({self.timeout_s}): "
                "not even one try would fit; raise deadline_s"
            )
        return self

    @property
    def address(self) -> str:
        return self.url or self.plan.url

    @property
    def answers_depend_on(self) -> list[str]:
        """Everything but the query that decides what is found."""
        own = type(self).model_fields.keys() - WebSettings.model_fields.keys()
        values = [str(getattr(self, name)) for name in sorted(own)]
        return [self.provider, self.address, *values, str(self.num_results)]

    @property
    def rate_per_s(self) -> float:
        """Requests a second that may leave."""
        return self.requests_per_s or self.plan.requests_per_s

    @property
    def price_usd(self) -> float:
        price = self.usd_per_request
        return self.plan.usd_per_request if price is None else price


@dataclass(frozen=True, slots=True)
class WebResult:
    """One line of a results page."""

    url: str
    title: str
    snippet: str


def fit_query(query: str) -> str:
    """``query`` on one line, no longer than every provider takes ("" where nothing is left)."""
    words = _UNSENDABLE.sub(" ", query).split()
    text = " ".join(words[:_MAX_QUERY_WORDS])[:_MAX_QUERY_CHARS]
    while len(quote_plus(text)) > _MAX_QUERY_BYTES:
        text = text[:-10]
    return text.strip()


class Item(Shape):
    """A result as Google and those who ask it write one."""

    title: str | None = None
    link: str | None = None
    snippet: str | None = None


def results_of(items: Sequence[Item]) -> list[WebResult]:
    """Items as results, each address once; what has no address is left out."""
    found: dict[str, WebResult] = {}
    for item in items:
        if item.link and item.link not in found:
            title = " ".join((item.title or "").split())
            found[item.link] = WebResult(
                _utf8(item.link), _utf8(title), _utf8((item.snippet or "").strip())
            )
    return list(found.values())


def _utf8(text: str) -> str:
    """Lone surrogates (legal in JSON, not in UTF-8) as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")

"""The four web search providers: what a request to each looks like, and who reads its reply.

serper.dev, Google Custom Search, SerpAPI and Brave Search, each as one frozen description. Nothing
here sends anything: ``forage.retrieval.web.web_exchange`` does, and keeps the keys out of what is
said. Replies are read by ``forage.retrieval.web.provider_replies``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol
from urllib.parse import quote_plus

from forage.retrieval.web.provider_replies import (
    WebResult,
    read_brave,
    read_google,
    read_serpapi,
    read_serper,
)

Engine = Literal["google", "google_light", "bing", "duckduckgo", "baidu", "yahoo", "yandex"]

# Brave refuses more than 400 characters or 50 words; Google reads 32 words, and takes requests of
# 2,048 bytes.
_MAX_QUERY_CHARS = 400
_MAX_QUERY_WORDS = 50
_MAX_QUERY_BYTES = 1500

_UNSENDABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # controls, lone surrogates


@dataclass(frozen=True, slots=True)
class WebRequest:
    """What is sent: ``params`` go into the address, ``body`` (where there is one) is JSON."""

    method: Literal["GET", "POST"]
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    body: dict[str, str | int] | None = None


class Provider(Protocol):
    """One way of searching the web."""

    name: ClassVar[str]

    @property
    def secrets(self) -> Sequence[str]:
        """What must never be said or logged."""
        ...

    @property
    def answers_depend_on(self) -> Sequence[str]:
        """Everything but the query that decides what is found."""
        ...

    def request(self, query: str) -> WebRequest: ...

    def read(self, reply: Any) -> list[WebResult]:
        """The results in a reply's JSON, best first; raises ``BadReply``."""
        ...


def fit_query(query: str) -> str:
    """``query`` on one line, no longer than every provider takes ("" where nothing is left)."""
    words = _UNSENDABLE.sub(" ", query).split()
    text = " ".join(words[:_MAX_QUERY_WORDS])[:_MAX_QUERY_CHARS]
    while len(quote_plus(text)) > _MAX_QUERY_BYTES:
        text = text[:-10]
    return text.strip()


@dataclass(frozen=True, slots=True)
class Serper:
    """serper.dev, which asks Google."""

    key: str = field(repr=False)
    num_results: int = 10
    url: str = "https://google.serper.dev/search"

    name: ClassVar[str] = "serper"

    @property
    def secrets(self) -> Sequence[str]:
        return (self.key,)

    @property
    def answers_depend_on(self) -> Sequence[str]:
        return (self.name, self.url, str(self.num_results))

    def request(self, query: str) -> WebRequest:
        return WebRequest(
            "POST",
            self.url,
            headers={"X-API-KEY": self.key},
            body={"q": query, "num": self.num_results},
        )

    def read(self, reply: Any) -> list[WebResult]:
        return read_serper(reply)


@dataclass(frozen=True, slots=True)
class GoogleCustomSearch:
    """Google Custom Search; ``engine_id`` is its ``cx``. At most 10 results a request."""

    key: str = field(repr=False)
    engine_id: str
    num_results: int = 10
    url: str = "https://www.googleapis.com/customsearch/v1"

    name: ClassVar[str] = "google"

    @property
    def secrets(self) -> Sequence[str]:
        return (self.key,)

    @property
    def answers_depend_on(self) -> Sequence[str]:
        return (self.name, self.url, self.engine_id, str(self.num_results))

    def request(self, query: str) -> WebRequest:
        params = {"key": self.key, "cx": self.engine_id, "q": query, "num": str(self.num_results)}
        return WebRequest("GET", self.url, params=params)

    def read(self, reply: Any) -> list[WebResult]:
        return read_google(reply)


# How each engine of SerpAPI names the query, and the number of results where it takes one.
_ENGINE_PARAMETERS: dict[Engine, tuple[str, str | None]] = {
    "google": ("q", "num"),
    "google_light": ("q", "num"),
    "bing": ("q", "count"),
    "duckduckgo": ("q", None),
    "baidu": ("q", "rn"),
    "yahoo": ("p", None),
    "yandex": ("text", None),
}


@dataclass(frozen=True, slots=True)
class SerpApi:
    """SerpAPI, which asks the engine that is named."""

    key: str = field(repr=False)
    engine: Engine = "google"
    num_results: int = 10
    url: str = "https://serpapi.com/search.json"

    name: ClassVar[str] = "serpapi"

    @property
    def secrets(self) -> Sequence[str]:
        return (self.key,)

    @property
    def answers_depend_on(self) -> Sequence[str]:
        return (self.name, self.url, self.engine, str(self.num_results))

    def request(self, query: str) -> WebRequest:
        query_name, count_name = _ENGINE_PARAMETERS[self.engine]
        params = {"engine": self.engine, query_name: query, "api_key": self.key}
        if count_name is not None:
            params[count_name] = str(self.num_results)
        return WebRequest("GET", self.url, params=params)

    def read(self, reply: Any) -> list[WebResult]:
        return read_serpapi(reply)[: self.num_results]


@dataclass(frozen=True, slots=True)
class Brave:
    """Brave Search. At most 20 results a request."""

    key: str = field(repr=False)
    num_results: int = 10
    url: str = "https://api.search.brave.com/res/v1/web/search"

    name: ClassVar[str] = "brave"

    @property
    def secrets(self) -> Sequence[str]:
        return (self.key,)

    @property
    def answers_depend_on(self) -> Sequence[str]:
        return (self.name, self.url, str(self.num_results))

    def request(self, query: str) -> WebRequest:
        return WebRequest(
            "GET",
            self.url,
            headers={"X-Subscription-Token": self.key, "Accept": "application/json"},
            params={
                "q": query,
                "count": str(self.num_results),
                "result_filter": "web",
                "text_decorations": "false",
            },
        )

    def read(self, reply: Any) -> list[WebResult]:
        return read_brave(reply)

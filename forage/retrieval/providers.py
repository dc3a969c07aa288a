"""The four web search providers: what a request to each looks like, and what its reply says.

serper.dev, Google Custom Search, SerpAPI and Brave Search, each as one frozen description. Nothing
here sends anything: ``forage.retrieval.web_exchange`` does, and keeps the keys out of what is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import unescape
from typing import Any, ClassVar, Literal, Protocol, TypeVar
from urllib.parse import quote_plus

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

Engine = Literal["google", "google_light", "bing", "duckduckgo", "baidu", "yahoo", "yandex"]

# Brave refuses more than 400 characters or 50 words; Google reads 32 words, and takes requests of
# 2,048 bytes.
_MAX_QUERY_CHARS = 400
_MAX_QUERY_WORDS = 50
_MAX_QUERY_BYTES = 1500

_UNSENDABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # controls, lone surrogates
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,200}>")


@dataclass(frozen=True, slots=True)
class WebResult:
    """One line of a results page."""

    url: str
    title: str
    snippet: str


@dataclass(frozen=True, slots=True)
class WebRequest:
    """What is sent: ``params`` go into the address, ``body`` (where there is one) is JSON."""

    method: Literal["GET", "POST"]
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    body: dict[str, str | int] | None = None


class BadReply(ValueError):
    """A reply without results in it: an error document, or something else altogether.

    ``status`` is the code that an error document names, where it names one.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


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
        checked = _check(_SerperReply, reply)
        if checked.organic is None and checked.searchParameters is None:
            raise BadReply(checked.message or "no results in the reply", checked.statusCode)
        return _results(checked.organic or [])


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
        checked = _check(_GoogleReply, reply)
        if checked.error is not None:
            raise BadReply(checked.error.message, checked.error.code)
        if checked.kind != "customsearch#search" and checked.items is None:
            raise BadReply("no results in the reply")
        return _results(checked.items or [])


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
        checked = _check(_SerpApiReply, reply)
        # A search that found nothing is a success that carries an "error" all the same.
        if checked.search_metadata is None or checked.search_metadata.status != "Success":
            raise BadReply(checked.error or "no finished search in the reply")
        return _results(checked.organic_results or [])[: self.num_results]


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
        checked = _check(_BraveReply, reply)
        if checked.type != "search":
            error = checked.error or _BraveError()
            raise BadReply(error.detail or error.code or "no results in the reply", error.status)
        return _results(checked.web.results if checked.web else [])


class _Reply(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Item(_Reply):
    title: str | None = None
    link: str | None = None
    snippet: str | None = None


class _SerperReply(_Reply):
    organic: list[_Item] | None = None
    searchParameters: dict[str, Any] | None = None
    message: str = ""
    statusCode: int | None = None


class _GoogleError(_Reply):
    message: str = ""
    code: int | None = None


class _GoogleReply(_Reply):
    kind: str = ""
    items: list[_Item] | None = None
    error: _GoogleError | None = None


class _SerpApiMetadata(_Reply):
    status: str = ""


class _SerpApiReply(_Reply):
    search_metadata: _SerpApiMetadata | None = None
    organic_results: list[_Item] | None = None
    error: str = ""


class _BraveItem(_Reply):
    title: str | None = None
    url: str | None = None
    description: str | None = None
    extra_snippets: list[str] = []

    @property
    def link(self) -> str | None:
        return self.url

    @property
    def snippet(self) -> str:
        return "\n".join([self.description or "", *self.extra_snippets])

    @field_validator("title", "description", mode="after")
    @classmethod
    def _without_markup(cls, text: str | None) -> str | None:
        return text and unescape(_TAG.sub("", text))


class _BraveError(_Reply):
    detail: str = ""
    code: str = ""
    status: int | None = None


class _BraveWeb(_Reply):
    results: list[_BraveItem] = []


class _BraveReply(_Reply):
    type: str = ""
    web: _BraveWeb | None = None
    error: _BraveError | None = None


_R = TypeVar("_R", bound=_Reply)


def _check(model: type[_R], reply: Any) -> _R:
    try:
        return model.model_validate(reply)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadReply(f"{where}: {first['msg']}" if where else first["msg"]) from None


def _results(items: Sequence[_Item | _BraveItem]) -> list[WebResult]:
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

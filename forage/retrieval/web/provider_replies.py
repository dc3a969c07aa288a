"""What the web search providers reply: results, nothing found, or an error document.

Each reader tells the three apart by what its provider documents, so that no error reads as an
empty result. Requests are ``forage.retrieval.web.providers``'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,200}>")


@dataclass(frozen=True, slots=True)
class WebResult:
    """One line of a results page."""

    url: str
    title: str
    snippet: str


class BadReply(ValueError):
    """A reply without results in it: an error document, or something else altogether.

    ``status`` is the code that an error document names, where it names one.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


def read_serper(reply: Any) -> list[WebResult]:
    """serper.dev's results; its error documents hold a message and a code."""
    checked = _check(_SerperReply, reply)
    if checked.organic is None and checked.searchParameters is None:
        raise BadReply(checked.message or "no results in the reply", checked.statusCode)
    return _results(checked.organic or [])


def read_google(reply: Any) -> list[WebResult]:
    """Google's results; a search that found nothing has no ``items``."""
    checked = _check(_GoogleReply, reply)
    if checked.error is not None:
        raise BadReply(checked.error.message, checked.error.code)
    if checked.kind != "customsearch#search" and checked.items is None:
        raise BadReply("no results in the reply")
    return _results(checked.items or [])


def read_serpapi(reply: Any) -> list[WebResult]:
    """SerpAPI's results; a search that found nothing is a success that carries an "error"."""
    checked = _check(_SerpApiReply, reply)
    if checked.search_metadata is None or checked.search_metadata.status != "Success":
        raise BadReply(checked.error or "no finished search in the reply")
    return _results(checked.organic_results or [])


def read_brave(reply: Any) -> list[WebResult]:
    """Brave's results, without their markup; a search that found nothing has no ``web``."""
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

"""The settings of a web source, checked: which provider, what it may cost, whether pages are read.

Given on the command line as ``key=value`` (``num_results=5``, ``pages.deadline_s=4``); every key is
read by ``forage.retrieval.web.web_source``. Keys of providers are no settings: they come from a
file or from the environment and are held apart.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forage.errors import UserError
from forage.retrieval.web.providers import Engine

ProviderName = Literal["serper", "google", "serpapi", "brave"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class PageSettings(_Frozen):
    """How pages of the web are fetched and what of them becomes a passage.

    ``deadline_s`` is for all pages of one search together; ``passage_chars`` is the part of a page
    around its snippet.
    """

    deadline_s: float = Field(default=8.0, gt=0)
    max_bytes: int = Field(default=2 * 2**20, ge=1024)
    passage_chars: int = Field(default=2000, ge=100)
    max_concurrent: int = Field(default=32, ge=1)
    max_redirects: int = Field(default=5, ge=0)


class WebSettings(_Frozen):
    """One provider: what is asked, how patiently, and for how much.

    ``engine`` is SerpAPI's and ``engine_id`` (its ``cx``) Google's alone. ``url`` is another
    address that speaks the provider's API. ``requests_per_s`` and ``usd_per_request`` are the
    provider's smallest paid plan unless given. ``ledger`` makes the cap outlive the process.
    """

    provider: ProviderName
    engine: Engine | None = None
    engine_id: str | None = Field(default=None, min_length=1)
    url: str | None = Field(default=None, pattern=r"^https?://")
    key_file: Path | None = None
    num_results: int = Field(default=10, ge=1)
    mode: Literal["snippets", "pages"] = "snippets"
    pages: PageSettings = PageSettings()
    timeout_s: float = Field(default=10.0, gt=0)
    deadline_s: float = Field(default=25.0, gt=0)
    max_retries: int = Field(default=2, ge=0)
    max_concurrent: int = Field(default=32, ge=1)
    requests_per_s: float | None = Field(default=None, gt=0)
    max_spend_usd: float = Field(default=10.0, ge=0)
    usd_per_request: float | None = Field(default=None, ge=0)
    ledger: Path | None = None
    cache_size: int = Field(default=10_000, ge=256)

    @model_validator(mode="after")
    def _keys_fit_the_provider(self) -> Self:
        plan = PLANS[self.provider]
        if self.engine is not None and self.provider != "serpapi":
            raise ValueError(f"engine is read by serpapi alone, not by {self.provider}; remove it")
        if self.engine_id is not None and self.provider != "google":
            raise ValueError(f"engine_id (cx) is Google's alone, not {self.provider}'s; remove it")
        if self.engine_id is None and self.provider == "google":
            raise ValueError("google needs engine_id, the cx of your Programmable Search Engine")
        if self.num_results > plan.max_results:
            raise ValueError(
                f"num_results is {self.num_results}; {self.provider} gives at most "
                f"{plan.max_results} a request"
            )
        return self

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        if self.mode == "snippets" and "pages" in self.model_fields_set:
            raise ValueError("pages.* is read with mode=pages alone; add it, or remove them")
        if self.deadline_s < self.timeout_s:
            raise ValueError(
                f"deadline_s ({self.deadline_s}) is shorter than timeout_s ({self.timeout_s}): "
                "not even one try would fit; raise deadline_s"
            )
        return self

    @property
    def rate_per_s(self) -> float:
        """Requests a second that may leave."""
        return self.requests_per_s or PLANS[self.provider].requests_per_s

    @property
    def price_usd(self) -> float:
        """What one request costs."""
        if self.usd_per_request is not None:
            return self.usd_per_request
        # serper.dev counts a request for more than 10 results twice.
        is_double = self.provider == "serper" and self.num_results > 10
        return PLANS[self.provider].usd_per_request * (2 if is_double else 1)


class ProviderPlan(_Frozen):
    """A provider's smallest paid plan as published in 2025, and where its key is looked for."""

    key_variable: str
    usd_per_request: float
    requests_per_s: float
    max_results: int


PLANS: dict[ProviderName, ProviderPlan] = {
    "serper": ProviderPlan(
        key_variable="SERPER_API_KEY", usd_per_request=0.001, requests_per_s=50, max_results=100
    ),
    "google": ProviderPlan(
        key_variable="GOOGLE_API_KEY", usd_per_request=0.005, requests_per_s=1.5, max_results=10
    ),
    "serpapi": ProviderPlan(
        key_variable="SERPAPI_API_KEY", usd_per_request=0.015, requests_per_s=5, max_results=100
    ),
    "brave": ProviderPlan(
        key_variable="BRAVE_API_KEY", usd_per_request=0.005, requests_per_s=1, max_results=20
    ),
}


def read_web_settings(provider: str, overrides: Sequence[str] = ()) -> WebSettings:
    """Settings from ``key=value`` texts; raises ``UserError`` that names each wrong key."""
    tree: dict[str, Any] = {"provider": provider}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key or key == "provider":
            raise UserError(
                f"web setting {override!r} is not of the form key=value, for example num_results=5"
            )
        *parents, last = key.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise UserError(f"web setting {override!r}: {name} has no keys below it")
        node[last] = value
    try:
        return WebSettings.model_validate(tree)
    except ValidationError as error:
        lines = [
            _explain(detail["loc"], detail["type"], detail["msg"]) for detail in error.errors()
        ]
        raise UserError(f"web:{provider}: " + "; ".join(lines)) from None


def read_key(settings: WebSettings) -> str:
    """The provider's key, from ``key_file`` or its environment variable; raises ``UserError``."""
    variable = PLANS[settings.provider].key_variable
    if settings.key_file is not None:
        try:
            key = settings.key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the key file {settings.key_file}: {error}") from error
        origin = str(settings.key_file)
    else:
        key = os.environ.get(variable, "").strip()
        origin = variable
    if not key:
        raise UserError(
            f"no key for {settings.provider} in {origin}; set {variable} in the environment, or "
            "key_file to a file that holds the key alone"
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"the key in {origin} holds white space or characters that no key has")
    return key


def _explain(location: tuple[int | str, ...], kind: str, message: str) -> str:
    name = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        keys = [*WebSettings.model_fields, *(f"pages.{key}" for key in PageSettings.model_fields)]
        close = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
        return f"unknown setting {name}" + (f"; did you mean {close[0]}?" if close else "")
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{name}: {message}"

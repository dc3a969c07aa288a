"""Lists the web providers and reads their settings from the command line.

Settings are given as ``key=value`` (``num_results=5``, ``pages.deadline_s=4``). Each provider's
file defines its settings; ``forage.retrieval.web.web_source`` uses them. A provider's API key is
not a setting: it comes from a file or the environment and is stored separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import SecretStr, ValidationError

from forage.errors import UserError, did_you_mean
from forage.remote.secret import read_key
from forage.retrieval.web.providers.brave import Brave
from forage.retrieval.web.providers.google import GoogleCustomSearch
from forage.retrieval.web.providers.provider import PageSettings, WebSettings
from forage.retrieval.web.providers.serpapi import SerpApi
from forage.retrieval.web.providers.serper import Serper

Provider = Serper | GoogleCustomSearch | SerpApi | Brave

PROVIDERS: dict[str, type[WebSettings]] = {model.provider: model for model in get_args(Provider)}


def read_web_settings(provider: str, overrides: Sequence[str] = ()) -> Provider:
    """Parses ``key=value`` strings; raises ``UserError`` that names each invalid key."""
    tree: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key or key == "provider":
            raise UserError(
                f"web setting {override!r} must have the form key=value, for example num_results=5"
            )
        *parents, last = key.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise UserError(f"web setting {override!r}: {name} has no keys below it")
        node[last] = value
    model = PROVIDERS.get(provider)
    if model is None:
        *first, last = (repr(name) for name in PROVIDERS)
        raise UserError(f"web:{provider}: provider: Input should be {', '.join(first)} or {last}")
    try:
        settings = model.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(provider, d["loc"], d["type"], d["msg"]) for d in error.errors()]
        raise UserError(f"web:{provider}: " + "; ".join(lines)) from None
    assert isinstance(settings, Provider), "the providers are those of the union"
    return settings


def read_provider_key(settings: WebSettings) -> SecretStr:
    """The API key, from ``key_file`` or the provider's variable; raises ``UserError``."""
    key = read_key(f"web:{settings.provider}", settings.key_file, settings.plan.key_variable)
    assert key is not None, "every plan names a variable"
    return key


def _explain(provider: str, location: tuple[int | str, ...], kind: str, message: str) -> str:
    name = ".".join(str(part) for part in location)
    if kind == "missing":
        return f"{provider} needs {name}, {PROVIDERS[provider].model_fields[name].description}"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind != "extra_forbidden":
        return f"{name}: {message}"
    for other, model in PROVIDERS.items():
        if name in model.model_fields:
            return f"{name} is a setting of {other}, not of {provider}; remove it"
    keys = [
        *PROVIDERS[provider].model_fields,
        *(f"pages.{key}" for key in PageSettings.model_fields),
    ]
    return f"unknown setting {name}{did_you_mean(name, keys)}"

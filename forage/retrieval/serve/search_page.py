"""The two pages for people: a search box at ``/`` and the description of the API at ``/docs``.

Both are whole in themselves: nothing is loaded from elsewhere, and a content security policy lets
nothing but their own script run, whatever a passage holds. The search page asks ``/retrieve`` like
any other client.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

_TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def search_page() -> str:
    """The page with the search box."""
    return _environment().get_template("search.html").render()


def docs_page(description: dict[str, Any], url: str) -> str:
    """The page that says how to call the service at ``url``, from its OpenAPI description."""
    operations = [
        {"method": method.upper(), "path": path, **operation}
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        _environment()
        .get_template("docs.html")
        .render(
            url=url.rstrip("/"),
            info=description["info"],
            operations=operations,
            schemas=description["components"]["schemas"],
            has_token="securitySchemes" in description["components"],
        )
    )


@functools.cache
def page_headers() -> dict[str, str]:
    """What a browser is told about these pages: nothing is loaded, one script may run."""
    digest = hashlib.sha256(_read("search.js").encode("utf-8")).digest()
    script = base64.b64encode(digest).decode("ascii")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        f"script-src 'sha256-{script}'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # Files of this project, not data: the only texts that are not escaped.
    environment.globals["style"] = Markup(_read("pages.css"))
    environment.globals["script"] = Markup(_read("search.js"))
    environment.filters["kind"] = _kind
    environment.filters["example"] = _example
    return environment


@functools.cache
def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _kind(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words: ``array of string (at most 1024)``."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(kind) for kind in schema["anyOf"])
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"array of {_kind(schema['items'])}"
    bounds = (
        ("minimum", "from {}"),
        ("maximum", "up to {}"),
        ("maxLength", "at most {} characters"),
        ("maxItems", "at most {}"),
    )
    said = [text.format(schema[key]) for key, text in bounds if key in schema]
    return f"{kind} ({', '.join(said)})" if said else str(kind)


def _example(operation: dict[str, Any], has_token: bool, url: str) -> str:
    """A command that calls the operation."""
    words = [f"curl -s {url}{operation['path']}"]
    if has_token and "security" in operation:
        words.append('-H "Authorization: Bearer $FORAGE_TOKEN"')
    bodies = {
        "/retrieve": {"queries": ["who wrote the first program"], "topk": 3, "return_scores": True},
        "/access": {"urls": ["https://en.wikipedia.org/wiki/Ada_Lovelace"]},
    }
    if operation["method"] == "POST":
        words.append("-H 'Content-Type: application/json'")
        words.append(f"-d '{json.dumps(bodies[operation['path']])}'")
    return " \\\n  ".join(words)

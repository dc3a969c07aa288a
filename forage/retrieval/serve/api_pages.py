"""Describes the service: OpenAPI, the page ``/docs`` made from it, and the search page at ``/``.

The description is derived from the wire models and the limits in force. Both pages are
self-contained, and a content security policy lets only their own script run, whatever a passage
contains. The search page calls ``/retrieve`` like any other client.
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
from pydantic.json_schema import models_json_schema

from forage import __version__
from forage.retrieval.serve.limits import Limits
from forage.retrieval.wire import (
    AccessReply,
    AccessRequest,
    DocumentPage,
    Page,
    PageChunk,
    PlainReply,
    Problem,
    RetrieveRequest,
    ScoredReply,
)

_TEMPLATES = Path(__file__).parent / "templates"

_MODELS = (
    *(RetrieveRequest, ScoredReply, PlainReply),
    *(AccessRequest, AccessReply, Page, DocumentPage, PageChunk),
)

_PROBLEMS = {
    400: "topk is above the limit",
    401: "the bearer token is missing or wrong",
    403: "the Host header is not one of the server's names, or the request is cross-origin",
    404: "the server has no page store",
    413: "too many queries, one too long, or too large a body or reply",
    415: "the Content-Type is not application/json",
    422: "the body is not JSON or does not match the schema",
    429: "the server is too busy to answer in time; Retry-After says when to retry",
    500: "internal server error",
    502: "the search backend rejected the query",
    503: "the search backend is temporarily unavailable, or the server is stopping",
    504: "not answered within the client's deadline (Prefer: wait=SECONDS) or the server's",
}


def describe_api(limits: Limits, has_token: bool) -> dict[str, Any]:
    """Returns this server's OpenAPI 3.1 document."""
    _, definitions = models_json_schema(
        [(model, "serialization") for model in (*_MODELS, Problem)],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Any] = definitions["$defs"]
    _set_limits(schemas, limits)
    retrieve = _operation(
        "retrieve",
        "Passages for queries",
        {"anyOf": [_ref("ScoredReply"), _ref("PlainReply")]},
        problems=(400, 403, 413, 415, 422, 429, 500, 502, 503, 504),
        description="Returns the passages for each query, best first; with scores if "
        "`return_scores` is true. An empty query has no passages.",
        requestBody={"required": True, "content": _content(_ref("RetrieveRequest"))},
    )
    access = _operation(
        "access",
        "Pages behind URLs",
        _ref("AccessReply"),
        problems=(403, 404, 413, 415, 422, 429, 500, 502, 503, 504),
        description="Returns the page behind each URL (part of it if `max_chars` is given), or "
        "null if there is none.",
        requestBody={"required": True, "content": _content(_ref("AccessRequest"))},
    )
    summary = "Metrics in Prometheus text format"
    metrics = _operation("metrics", summary, {"type": "string"}, media_type="text/plain")
    healthz = _operation("healthz", "Whether the process is up", {"type": "object"})
    readyz = _operation(
        "readyz", "Whether searches are answered", {"type": "object"}, problems=(503,)
    )
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Forage search", "version": __version__},
        "paths": {
            "/retrieve": {"post": retrieve},
            "/access": {"post": access},
            "/healthz": {"get": healthz},
            "/readyz": {"get": readyz},
            "/metrics": {"get": metrics},
        },
        "components": {"schemas": schemas},
    }
    if has_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for operation in (retrieve, access, metrics):
            operation["security"] = [{"token": []}]
            operation["responses"]["401"] = _problem(401)
    return document


def _operation(
    name: str,
    summary: str,
    reply: dict[str, Any],
    media_type: str = "application/json",
    problems: tuple[int, ...] = (),
    **request: Any,
) -> dict[str, Any]:
    """Describes one path; ``request`` holds the OpenAPI fields about its request."""
    description = "Success" if "requestBody" in request else summary
    answered = {"description": description, "content": _content(reply, media_type)}
    responses = {"200": answered} | {str(status): _problem(status) for status in problems}
    return {"operationId": name, "summary": summary, **request, "responses": responses}


def _problem(status: int) -> dict[str, Any]:
    return {"description": _PROBLEMS[status], "content": _content(_ref("Problem"))}


def _content(schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": schema}}


def _ref(model: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model}"}


def _set_limits(schemas: dict[str, Any], limits: Limits) -> None:
    """Writes this server's limits into the request schemas."""
    for model, field, most in (
        ("RetrieveRequest", "queries", limits.max_queries),
        ("AccessRequest", "urls", limits.max_urls),
    ):
        texts = schemas[model]["properties"][field]
        texts["items"]["maxLength"] = limits.max_query_chars
        if most is not None:
            texts["maxItems"] = most
    topk = schemas["RetrieveRequest"]["properties"]["topk"]
    next(kind for kind in topk["anyOf"] if kind.get("type") == "integer")["maximum"] = (
        limits.max_topk
    )


@functools.cache
def search_page() -> str:
    return _environment().get_template("search.html").render()


def docs_page(description: dict[str, Any], url: str) -> str:
    """Renders the page that explains how to call the service at ``url``."""
    operations = [
        {"method": method.upper(), "path": path, **operation}
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    template = _environment().get_template("docs.html")
    return template.render(
        url=url.rstrip("/"),
        info=description["info"],
        operations=operations,
        schemas=description["components"]["schemas"],
        has_token="securitySchemes" in description["components"],
    )


@functools.cache
def page_headers() -> dict[str, str]:
    """Headers of these pages: the browser loads nothing and runs only their one script."""
    digest = hashlib.sha256(_script().encode("utf-8")).digest()
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
    # The only texts that are not escaped: they are files of this project, not data.
    environment.globals["style"] = Markup(_read("pages.css"))
    environment.globals["script"] = Markup(_script())
    environment.filters["kind"] = _kind
    environment.filters["example"] = _example
    return environment


def _script() -> str:
    return _read("markdown.js") + _read("search.js")


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
    limits = [text.format(schema[key]) for key, text in bounds if key in schema]
    return f"{kind} ({', '.join(limits)})" if limits else str(kind)


def _example(operation: dict[str, Any], has_token: bool, url: str) -> str:
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

"""The service described as OpenAPI, from the models that travel and the limits in force."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from forage import __version__
from forage.retrieval.serve.limits import Limits
from forage.retrieval.wire import (
    AccessReply,
    AccessRequest,
    Page,
    PageChunk,
    PlainReply,
    Problem,
    RetrieveRequest,
    ScoredReply,
)

_MODELS = (
    RetrieveRequest,
    ScoredReply,
    PlainReply,
    AccessRequest,
    AccessReply,
    Page,
    PageChunk,
    Problem,
)

_PROBLEMS = {
    400: "topk is above the limit",
    401: "the bearer token is missing or wrong",
    404: "this server has no pages",
    413: "too many queries, one too long, or too large a body",
    422: "not JSON, or not of this form",
    429: "too many requests are in flight; Retry-After says when to return",
    500: "a fault of the server",
    502: "what is searched refused for good",
    503: "what is searched is out of order for now, or the server is stopping",
    504: "not answered within the server's deadline",
}


def describe_api(limits: Limits, has_token: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of this server."""
    _, definitions = models_json_schema(
        [(model, "serialization") for model in _MODELS],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Any] = definitions["$defs"]
    _set_limits(schemas, limits)
    retrieve = _post(
        "retrieve",
        "Passages for queries",
        "For each query its passages, best first: with scores if `return_scores` is true. "
        "An empty query has none.",
        "RetrieveRequest",
        {"anyOf": [_ref("ScoredReply"), _ref("PlainReply")]},
        (400, 413, 422, 429, 500, 502, 503, 504),
    )
    access = _post(
        "access",
        "Pages behind addresses",
        "For each address its page (a part of it, if `max_chars` is given), or null where there "
        "is none.",
        "AccessRequest",
        _ref("AccessReply"),
        (404, 413, 422, 429, 500, 502, 503, 504),
    )
    metrics = _get("metrics", "Figures in Prometheus' text format", "text/plain")
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Forage search", "version": __version__},
        "paths": {
            "/retrieve": {"post": retrieve},
            "/access": {"post": access},
            "/healthz": {"get": _get("healthz", "The process answers", "application/json")},
            "/readyz": {"get": _get("readyz", "Searches are answered", "application/json", (503,))},
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


def _post(
    name: str,
    summary: str,
    description: str,
    request: str,
    reply: dict[str, Any],
    problems: tuple[int, ...],
) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "description": description,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        },
        "responses": {
            "200": {"description": "Answered", "content": {"application/json": {"schema": reply}}},
            **{str(status): _problem(status) for status in problems},
        },
    }


def _get(
    name: str, summary: str, media_type: str, problems: tuple[int, ...] = ()
) -> dict[str, Any]:
    schema = {"type": "object"} if media_type == "application/json" else {"type": "string"}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": {media_type: {"schema": schema}}},
            **{str(status): _problem(status) for status in problems},
        },
    }


def _problem(status: int) -> dict[str, Any]:
    return {
        "description": _PROBLEMS[status],
        "content": {"application/json": {"schema": _ref("Problem")}},
    }


def _ref(model: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model}"}


def _set_limits(schemas: dict[str, Any], limits: Limits) -> None:
    """Write the limits of this server into the schemas of what it is asked."""
    for model, field in (("RetrieveRequest", "queries"), ("AccessRequest", "urls")):
        texts = schemas[model]["properties"][field]
        texts["maxItems"] = limits.max_queries
        texts["items"]["maxLength"] = limits.max_query_chars
    topk = schemas["RetrieveRequest"]["properties"]["topk"]
    next(kind for kind in topk["anyOf"] if kind.get("type") == "integer")["maximum"] = (
        limits.max_topk
    )

"""The search tool: its description for the model, how its arguments are parsed, and how it runs.

The retriever belongs to the episode: an evaluation arm may search differently or not at all. The
queries of one call run at the same time, and their passages are interleaved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from forage.environment.actions import Invalid, Search
from forage.environment.dialects import Dialect
from forage.environment.observation import NOTHING_FOUND, SEARCH_FAILED, SWITCHED_OFF, passage_texts
from forage.environment.tools.tool import Arguments, Tool, ToolReply
from forage.types import SEARCH_TOOL, Hit, Retriever, SearchReply

MAX_QUERIES = 4
_NO_QUERIES = Invalid("query_list must be a list of texts.")


def make_search(has_addresses: bool = False, dialect: Dialect | None = None) -> Tool:
    """Creates the tool; ``has_addresses`` shows passages' addresses, for a tool that opens pages.

    With a ``dialect``, results are formatted as in that published system, and queries may be empty.
    """
    if dialect is not None:
        tool = make_search()
        run, failed_note = partial(_run_in_dialect, dialect), dialect.note(SEARCH_FAILED)
        return replace(tool, run=run, failed_note=failed_note, reads=_read_leniently)
    return Tool(
        name=SEARCH_TOOL,
        description="Searches an encyclopedia and returns the best passages for each query.",
        parameters={
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "minItems": 1,
                    "maxItems": MAX_QUERIES,
                    "description": "What to search for, each query by itself.",
                }
            },
            "required": ["query_list"],
        },
        run=partial(_run, has_addresses),
        failed_note=SEARCH_FAILED,
        placeholder="query",
        reads=_read,
    )


def _read(arguments: object) -> Search | Invalid:
    queries = _queries(arguments)
    if queries is None:
        return _NO_QUERIES
    stripped = [query.strip() for query in queries]
    if not stripped or not all(stripped):
        return Invalid("The search query is empty.")
    if len(stripped) > MAX_QUERIES:
        return Invalid(f"At most {MAX_QUERIES} queries may be asked at once.")
    return Search(stripped[0], tuple(stripped[1:]))


def _read_leniently(arguments: object) -> Search | Invalid:
    """Accepts any list of strings, including empty ones and any number of them."""
    queries = _queries(arguments)
    return Search(queries[0], tuple(queries[1:])) if queries else _NO_QUERIES


def _queries(arguments: object) -> list[str] | None:
    queries = arguments.get("query_list") if isinstance(arguments, dict) else None
    is_right = isinstance(queries, list) and all(isinstance(query, str) for query in queries)
    return queries if is_right else None


async def _run_in_dialect(dialect: Dialect, arguments: Arguments, search: Retriever) -> ToolReply:
    replies = await asyncio.gather(*map(search.search, arguments["query_list"]))
    for reply in replies:
        if reply.failure is not None:
            return ToolReply(failure=reply.failure, detail=reply.detail)
        if reply.is_switched_off:
            return ToolReply(note=dialect.note(SWITCHED_OFF))
    scores = {hit.passage.id: hit.score for reply in replies for hit in reply.hits_K}
    texts = dialect.show([reply.hits_K for reply in replies])
    return ToolReply(tuple(replace(t, score=scores.get(t.id)) if t.id else t for t in texts))


async def _run(has_addresses: bool, arguments: Arguments, search: Retriever) -> ToolReply:
    reply = _merge(await asyncio.gather(*map(search.search, arguments["query_list"])))
    if reply.failure is not None:
        return ToolReply(failure=reply.failure, detail=reply.detail)
    if reply.is_switched_off:
        return ToolReply(note=SWITCHED_OFF)
    if not reply.hits_K:
        return ToolReply(note=NOTHING_FOUND)
    return ToolReply(tuple(passage_texts(reply.hits_K, has_addresses)))


def _merge(replies: Sequence[SearchReply]) -> SearchReply:
    """Merges the replies to several queries: their hits in turn, or the first failure."""
    if len(replies) == 1:
        return replies[0]
    unanswered = next((r for r in replies if r.failure is not None or r.is_switched_off), None)
    if unanswered is not None:
        return unanswered
    hits: dict[str, Hit] = {}
    for row in zip_longest(*(reply.hits_K for reply in replies)):
        for hit in row:
            if hit is not None:
                hits.setdefault(hit.passage.id, hit)
    return SearchReply(tuple(hits.values()))


SEARCH = make_search()

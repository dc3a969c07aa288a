"""The tool that opens a page: the whole text at an address, part by part.

The search server provides the pages (``POST /access``). If the episode's retriever cannot open any,
as in evaluation arms with another search, the model is shown a note.
"""

from __future__ import annotations

from functools import partial

from forage.environment.observation import ResultText
from forage.environment.tools.tool import Arguments, Tool, ToolReply
from forage.types import PageOpener, Retriever

OPEN_PAGE = "open_page"
_CHARACTERS_PER_TOKEN = 3
"""A low estimate, so that a part of a page nearly always fits its observation."""
_NO_PAGES = "There are no pages to open here.\n"
_NO_SUCH_PAGE = "There is no page at this address.\n"
_NO_SUCH_PART = "The page has no such part.\n"


def make_open_page(max_observation_tokens: int) -> Tool:
    """Creates the tool, with page parts that fit an observation of this many tokens.

    A call may take ``search.deadline_s``, like a search.
    """
    return Tool(
        name=OPEN_PAGE,
        description="Opens the page at an address that a search has shown, one part at a time.",
        parameters={
            "type": "object",
            "properties": {
                "address": {"type": "string", "description": "The address of the page."},
                "part": {"type": "integer", "description": "Which part of the page, from 1."},
            },
            "required": ["address"],
        },
        run=partial(_run, max_observation_tokens * _CHARACTERS_PER_TOKEN),
        failed_note="The page could not be opened.\n",
    )


async def _run(max_chars: int, arguments: Arguments, search: Retriever) -> ToolReply:
    if not isinstance(search, PageOpener):
        return ToolReply(note=_NO_PAGES)
    address, chunk = arguments["address"].strip(), arguments.get("part", 1) - 1
    if chunk < 0:
        return ToolReply(note=_NO_SUCH_PART)
    reply = await search.open_page(address, chunk, max_chars)
    if reply.failure is not None:
        return ToolReply(failure=reply.failure, detail=reply.detail)
    if reply.page is None:
        return ToolReply(note=_NO_SUCH_PAGE)
    page = reply.page
    if chunk >= page.num_chunks:
        return ToolReply(note=_NO_SUCH_PART)
    head = f"Part {page.chunk + 1} of {page.num_chunks}: " if page.num_chunks > 1 else ""
    return ToolReply((ResultText(f"{head}{page.text}\n", page.url),))

"""The tools of a run, by the names that ``environment.tools`` gives: built in, or the user's own.

Adding a built-in tool is a file beside this one and a line in ``_built_in``; a tool of the user's
is named by its import path, and nothing here changes.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter

from forage.config.environment_config import EnvironmentConfig
from forage.environment.tools.open_page import OPEN_PAGE, make_open_page
from forage.environment.tools.own_tools import own_tool
from forage.environment.tools.search import make_search
from forage.environment.tools.tool import Tool
from forage.errors import UserError
from forage.settings import IMPORT_PATH, load_by_path
from forage.types import SEARCH_TOOL, Tag

_NAME = re.compile(r"[a-z][a-z0-9_]{1,31}")
_RESERVED = ({*Tag} - {Tag.SEARCH}) | {"tools"}


def load_tools(config: EnvironmentConfig) -> tuple[Tool, ...]:
    """The tools of ``environment.tools``, in its order; raises ``UserError``."""
    built_in = _built_in(config)
    tools = tuple(
        own_tool(load_by_path(name, "environment.tools"), name)
        if re.match(IMPORT_PATH, name)
        else _known(name, built_in)
        for name in config.tools
    )
    for name, tool in zip(config.tools, tools, strict=True):
        _check(tool, name)
    name, count = Counter(tool.name for tool in tools).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"environment.tools holds {count} tools of the name {name} ({', '.join(config.tools)});"
            " a name says which is meant, so give one of them another"
        )
    return tools


def _built_in(config: EnvironmentConfig) -> dict[str, Tool]:
    return {
        SEARCH_TOOL: make_search(has_addresses=OPEN_PAGE in config.tools),
        OPEN_PAGE: make_open_page(config.max_observation_tokens),
    }


def _known(name: str, built_in: dict[str, Tool]) -> Tool:
    if name in built_in:
        return built_in[name]
    close = difflib.get_close_matches(name, built_in, n=1)
    raise UserError(
        f"environment.tools: there is no tool {name!r}"
        + (f"; did you mean {close[0]}?" if close else "")
        + f" (built in: {', '.join(built_in)}; one of your own is written module:name)"
    )


def _check(tool: Tool, path: str) -> None:
    where = f"environment.tools: the tool {tool.name!r} of {path}"
    if not _NAME.fullmatch(tool.name):
        raise UserError(
            f"{where} has a name that makes no tag; use 2 to 32 small letters, digits and _, a "
            "letter first"
        )
    if tool.name in _RESERVED or (tool.name == SEARCH_TOOL and path != SEARCH_TOOL):
        raise UserError(f"{where} has the name of a tag of the protocol; give it another name")
    if tool.prompt_line is not None and not isinstance(tool.prompt_line, str):
        raise UserError(f"{where} has a prompt_line that is no text, but {tool.prompt_line!r}")
    limits = (
        ("timeout_s", tool.timeout_s),
        ("max_observation_tokens", tool.max_observation_tokens),
    )
    for name, limit in limits:
        if limit is not None and (not isinstance(limit, int | float) or limit <= 0):
            raise UserError(f"{where} has {name} = {limit!r}; it must be a number above 0")

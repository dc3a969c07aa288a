"""The search tool of the native protocol: what the model is told, and how its calls are read.

One object holds the schema that goes into the prompt through the chat template, the spelling of a
call that this template's family was trained on, and the parser of that spelling. Qwen, Hermes and
their like write ``<tool_call>{"name", "arguments"}</tool_call>``; Llama 3.1 and later write
``{"name", "parameters"}`` as the whole turn.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from forage.environment.actions import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    Answer,
    Invalid,
    Search,
    first_block,
)
from forage.environment.chat import ToolSchema, render
from forage.environment.codec import Codec
from forage.errors import UserError

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
NAME = "search"
MAX_QUERIES = 4

_BARE_CALL = re.compile(r'\{\s*"name"\s*:')
_QUERY = "QUERYx6Tn58PLACEx"


@dataclass(frozen=True, slots=True)
class SearchTool:
    """``search(query_list: list[str])``, spelt as the family of a chat template spells calls."""

    spelling: Literal["hermes", "llama3"]

    @property
    def schema(self) -> ToolSchema:
        """What the chat template is given: a function in JSON schema."""
        return _SCHEMA

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends a turn besides the end-of-turn token: a bare call ends with that alone."""
        return (CALL_CLOSE, ANSWER_CLOSE) if self.spelling == "hermes" else (ANSWER_CLOSE,)

    def write(self, *queries: str) -> str:
        """A call as the model should write it."""
        key = "arguments" if self.spelling == "hermes" else "parameters"
        call = json.dumps({"name": NAME, key: {"query_list": list(queries)}}, ensure_ascii=False)
        return f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}" if self.spelling == "hermes" else call

    def parse(self, text: str) -> Search | Answer | Invalid:
        """The first call or answer of a turn decides; a call that cannot be read is invalid."""
        call = self._first_call(text)
        answer = first_block(text, ANSWER_OPEN, ANSWER_CLOSE)
        if call and (answer is None or call[0] < answer[0]):
            return _read_call(call[1])
        if answer:
            return Answer(answer[1].strip())
        if self.spelling == "hermes" and CALL_OPEN in text:
            return Invalid(f"{CALL_OPEN} is opened but never closed with {CALL_CLOSE}.")
        return Invalid(f"The turn holds neither a call of {NAME} nor {ANSWER_OPEN}.")

    def _first_call(self, text: str) -> tuple[int, str] | None:
        """Where the first call starts, and its JSON with what follows it."""
        if self.spelling == "hermes":
            return first_block(text, CALL_OPEN, CALL_CLOSE)
        match = _BARE_CALL.search(text)
        return (match.start(), text[match.start() :]) if match else None


def derive_tool(codec: Codec) -> SearchTool:
    """The tool in the spelling of the tokenizer's chat template; raises ``UserError``.

    The template is shown a call, and the parser must read what it makes of it.
    """
    tokenizer = codec.tokenizer
    advice = "use environment.protocol: tags, or an instruct model that knows tools"
    if not tokenizer.chat_template:
        raise UserError(f"this tokenizer has no chat template to describe tools with; {advice}")
    asked = {"role": "user", "content": _QUERY}
    prompt = render(tokenizer, [asked], [_SCHEMA])
    if '"query_list"' not in prompt:
        raise UserError(f"this tokenizer's chat template shows the model no tools; {advice}")
    function = {"name": NAME, "arguments": {"query_list": [_QUERY]}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    # The last place of the placeholder is in the call; tools may stand in the user's message.
    shown = render(tokenizer, [asked, call], [_SCHEMA]).split(_QUERY, 1)[-1]
    tool = SearchTool("hermes" if CALL_OPEN in shown else "llama3")
    if tool.parse(shown) != Search(_QUERY):
        raise UserError(
            f"this tokenizer's chat template writes a call of a tool as {shown[:200]!r}, which "
            f"Forage cannot read; {advice}"
        )
    return tool


def _read_call(text: str) -> Search | Invalid:
    try:
        call, _ = json.JSONDecoder().raw_decode(text.strip())
    except (json.JSONDecodeError, RecursionError):
        return Invalid("The call is not valid JSON.")
    if not isinstance(call, dict) or call.get("name") != NAME:
        return Invalid(f"There is one tool, and its name is {NAME}.")
    arguments = call.get("arguments", call.get("parameters"))
    queries: Any = arguments.get("query_list") if isinstance(arguments, dict) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        return Invalid("query_list must be a list of texts.")
    stripped = [query.strip() for query in queries]
    if not stripped or not all(stripped):
        return Invalid("The search query is empty.")
    if len(stripped) > MAX_QUERIES:
        return Invalid(f"At most {MAX_QUERIES} queries may be asked at once.")
    return Search(stripped[0], tuple(stripped[1:]))


_SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Searches an encyclopedia and returns the best passages for each query.",
        "parameters": {
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
    },
}

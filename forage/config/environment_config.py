"""The settings of ``environment``: the protocol of an episode and its budgets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from forage.settings import Frozen


class EnvironmentConfig(Frozen):
    """The protocol, the tools and the budgets of an episode; the prompt follows the protocol."""

    protocol: Literal["tags", "tools"] = "tags"
    """tags in the policy's own text, or tools through the chat template."""
    tools: tuple[str, ...] = Field(default=("search",), min_length=1)
    """search, open_page, a tool of one's own (module:name), or an MCP server's (mcp:URL)."""
    prompt: str = "search-r1"
    """A built-in template or a file of one."""
    max_turns: int = Field(default=4, ge=1)
    """Turns of an episode at most."""
    has_final_turn: bool = True
    """Whether one more turn, in which no search is run, asks for the answer."""
    max_turn_tokens: int = Field(default=500, ge=1)
    """Tokens that a turn may sample."""
    max_observation_tokens: int = Field(default=500, ge=16)
    """Tokens of an observation at most."""
    max_tokens: int = Field(default=4096, ge=64)
    """Tokens of an episode at most, with its prompt."""

    @model_validator(mode="before")
    @classmethod
    def _prompt_of_the_protocol(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("protocol") == "tools":
            return {"prompt": "tools", **values}
        return values

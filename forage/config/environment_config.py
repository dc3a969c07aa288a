"""The settings of ``environment``: the protocol of an episode and its budgets.

``run_config.py`` hangs them under its root and checks the budgets against the trainer's.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from forage.settings import Frozen


class EnvironmentConfig(Frozen):
    """The protocol, the tools and the budgets of an episode (tokens, turns).

    ``protocol``: ``tags`` in the policy's own text, or native ``tools`` through the tokenizer's
    chat template. ``tools``: ``search``, ``open_page``, or one of the user's own by its import path
    (``module:name``). ``prompt`` is a built-in template or a file, by default that of the protocol.
    """

    protocol: Literal["tags", "tools"] = "tags"
    tools: tuple[str, ...] = Field(default=("search",), min_length=1)
    prompt: str = "search-r1"
    max_turns: int = Field(default=4, ge=1)
    has_final_turn: bool = True
    max_turn_tokens: int = Field(default=500, ge=1)
    max_observation_tokens: int = Field(default=500, ge=16)
    max_tokens: int = Field(default=4096, ge=64)

    @model_validator(mode="before")
    @classmethod
    def _prompt_of_the_protocol(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("protocol") == "tools":
            return {"prompt": "tools", **values}
        return values

"""The settings of ``model.endpoint``: a server that speaks OpenAI's API, as the policy.

``model_config.py`` hangs them under ``model``, and ``run_config.py`` refuses them for training.
Keys of servers are no settings: a variable or a file that holds one is named here, and
``forage.rollout.engines.endpoint_client`` reads it. What each form can and cannot know of the
policy is told in docs/endpoints.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, model_validator

from forage.settings import Frozen

Form = Literal["completions", "chat"]
Omittable = Literal["temperature", "top_p", "seed", "stop", "max_tokens"]

# What the engine of each form writes into a request itself, or could not read the reply to.
_SHARED_FIELDS = frozenset(
    ("model", "stream", "n", "temperature", "top_p", "seed", "stop", "max_tokens", "logprobs")
)
_OWN_FIELDS: dict[Form, frozenset[str]] = {
    "chat": _SHARED_FIELDS | {"messages", "tools"},
    "completions": _SHARED_FIELDS
    | {"prompt", "return_token_ids", "stop_token_ids", "include_stop_str_in_output", "echo"}
    | {"no_stop_trim", "skip_special_tokens", "top_k", "min_p", "repetition_penalty"},
}


class EndpointConfig(Frozen):
    """Where the model is served, under which name, and how patiently it is asked.

    ``form``: ``completions`` sends and gets token ids (vLLM and SGLang), ``chat`` knows texts alone
    (any other server). ``omit`` leaves fields out that a server of the chat form will not have, and
    ``extra`` is sent with each request as it stands, both for models with rules of their own.
    """

    url: str = Field(pattern=r"^https?://[^\s]+$")
    """What the paths of the API stand under, for example http://127.0.0.1:8000/v1."""
    served_model: str = Field(min_length=1)
    """The name under which the server knows the model."""
    form: Form = "completions"
    """completions: token ids both ways (vLLM, SGLang); chat: texts alone."""
    key_variable: str | None = Field(default=None, min_length=1)
    """The environment variable that holds the key of the server."""
    key_file: Path | None = None
    """The file that holds the key of the server."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which a request is given up."""
    max_retries: int = Field(default=4, ge=0)
    """How often a failed request is sent again."""
    max_concurrent_requests: int = Field(default=32, ge=1)
    """Requests at the same time at most."""
    omit: tuple[Omittable, ...] = ()
    """Fields that a server of the form chat does not take."""
    extra: dict[str, JsonValue] = Field(default={})
    """Fields that are sent with each request as they stand."""

    @property
    def base_url(self) -> str:
        """The address that ``/completions``, ``/chat/completions`` and ``/models`` hang under."""
        return self.url.rstrip("/")

    @model_validator(mode="after")
    def _checks(self) -> Self:
        parts = urlsplit(self.url)
        if self.base_url.endswith("/completions"):
            raise ValueError(
                f"model.endpoint.url is {self.url}: name what the paths of the API hang under, for "
                "example http://127.0.0.1:8000/v1; model.endpoint.form chooses between them"
            )
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "model.endpoint.url holds a user, a password or a query, which recipes and logs "
                "would show: use model.endpoint.key_file or key_variable"
            )
        if self.key_variable is not None and self.key_file is not None:
            raise ValueError(
                "model.endpoint.key_variable and key_file both name a key; leave one of them out"
            )
        if self.omit and self.form == "completions":
            raise ValueError(
                f"model.endpoint.omit ({', '.join(self.omit)}) is for form: chat; a server that "
                "gives token ids takes all these fields"
            )
        own = sorted(_OWN_FIELDS[self.form] & self.extra.keys())
        if own:
            raise ValueError(
                f"model.endpoint.extra holds {', '.join(own)}, which follow from other settings "
                "(rollout.temperature, rollout.top_p, environment.max_turn_tokens, seed)"
            )
        return self

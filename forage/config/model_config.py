"""The settings of ``model``: the policy's weights and adapters, or a server that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, field_validator, model_validator

from forage.config.shipped_recipes import find_model
from forage.settings import Frozen

KEYS_OF_WEIGHTS = ("dtype", "arithmetic", "device", "compile", "gradient_checkpointing", "lora")
"""Keys of ``model`` that are read where the weights are loaded here."""


class LoraConfig(Frozen):
    """Adapters beside linear layers."""

    rank: int = Field(default=16, ge=1)
    """The rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The share of the adapters' input that forage sft drops."""
    target_modules: tuple[str, ...] = ()
    """Names of layers such as q_proj; none: every linear layer of the blocks."""


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
    """Where the model is served by OpenAI's API, under which name, and how patiently it is asked.

    Keys of servers are no settings: a variable or a file that holds one is named here. What each
    form can and cannot know of the policy is told in docs/endpoints.md.
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


class ModelConfig(Frozen):
    """The policy; with ``endpoint`` a server samples, and ``path`` names the tokenizer alone."""

    path: str
    """A Hugging Face directory or hub id, or a directory of adapters."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the weights."""
    arithmetic: Literal["bfloat16"] | None = None
    """The type of products over float32 weights; null: that of the weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the weights are; CUDA_VISIBLE_DEVICES chooses the GPU."""
    compile: bool = False
    """Fuse the operations between products by torch.compile: faster on a GPU, after a minute."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, to save memory; learning compiles nothing."""
    lora: LoraConfig | None = None
    """Learn adapters and leave the weights as they are; null: learn the weights."""
    endpoint: EndpointConfig | None = None
    """A server that samples instead, for forage eval and play; null: none."""

    @field_validator("path")
    @classmethod
    def _where_it_ships(cls, path: str) -> str:
        return find_model(path)

    @field_validator("device", mode="before")
    @classmethod
    def _no_number(cls, device: object) -> object:
        """Threads of their own sample, learn and write, and each begins on the first GPU."""
        if isinstance(device, str) and device.startswith("cuda:"):
            raise ValueError(
                f"model.device is {device}: set it to cuda, and choose the GPU by the environment "
                f"variable CUDA_VISIBLE_DEVICES={device.removeprefix('cuda:')}"
            )
        return device

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        if self.endpoint is not None:
            for name in sorted(set(KEYS_OF_WEIGHTS) & self.model_fields_set):
                raise ValueError(
                    f"model.{name} does nothing with model.endpoint, where a server has the "
                    "weights; remove it"
                )
        if self.arithmetic is not None and self.dtype != "float32":
            raise ValueError(
                f"model.arithmetic does nothing with model.dtype: {self.dtype}, in which all is "
                "computed; set model.dtype to float32, or remove it"
            )
        if self.compile and self.arithmetic is not None:
            raise ValueError(
                "model.compile and model.arithmetic exclude each other: weights are cast between "
                "the operations that would be compiled; remove one of them"
            )
        return self

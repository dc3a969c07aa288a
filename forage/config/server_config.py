"""The settings of servers that sample: where they are, how they are started, how weights come.

``placement.engine`` chooses among them and the in-process engine. docs/engines.md has their use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from forage.settings import Frozen


class ServerPlacement(Frozen):
    """Servers with a copy of the weights, reached over HTTP; an episode stays with one of them."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that an engine is cut over."""
    offload: bool = False
    """Share GPUs in turn: servers sleep while the trainer learns, whose states rest in the host."""
    urls: tuple[str, ...] = ()
    """Servers that run already, for example http://10.0.0.5:8000; none: Forage starts its own."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a turn is given up at a server, which is then asked for its health."""
    update_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that each step of an update of the weights may take."""
    lost_after_s: float = Field(default=300.0, gt=0)
    """Seconds without any server that works, after which the run ends with an error."""
    max_logprob_diff: float | None = Field(default=None, gt=0)
    """Mean log-probability difference that takes a server out; null: 1e-3 in float32, else 0.1."""
    cache_on_update: Literal["recompute", "keep"] = "recompute"
    """Whether turns in flight go on over keys and values of the new weights or of the old ones."""

    @model_validator(mode="after")
    def _urls_are_addresses(self) -> Self:
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.netloc or parts.query:
                raise ValueError(
                    f"placement.engine.urls has {url!r}: name the address of a server, for "
                    "example http://127.0.0.1:8000"
                )
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("placement.engine.urls names a server twice; name each once")
        return self


KEYS_OF_OWN_SERVERS = ("num_servers", "own_gpus", "program", "arguments", "startup_timeout_s")
"""Keys for servers that Forage starts, refused where running ones are named."""


class VllmPlacement(ServerPlacement):
    """Servers of vLLM, started by Forage or by the user."""

    kind: Literal["vllm"] = "vllm"
    num_servers: int | None = Field(default=None, ge=1)
    """Servers that Forage starts; null: one for each tensor_parallel GPUs."""
    own_gpus: int = Field(default=0, ge=0)
    """GPUs of the run that servers have for themselves; 0: they share those of the trainer."""
    program: Path | None = None
    """The vllm command; null: that of make vllm if it is there, else the one on the PATH."""
    arguments: tuple[str, ...] = ()
    """More arguments of vllm serve, for servers that Forage starts."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a server may take to start."""
    transfer: Literal["group", "disk", "adapters"] = "group"
    """How weights travel: a torch process group, files that both see, or model.lora's alone."""

    @model_validator(mode="after")
    def _shares_or_has_its_own(self) -> Self:
        if self.offload and self.own_gpus:
            raise ValueError(
                f"placement.engine.own_gpus ({self.own_gpus}) gives servers GPUs of their own, and "
                "placement.engine.offload has them share the trainer's in turn; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _own_servers_are_not_named(self) -> Self:
        named = {*KEYS_OF_OWN_SERVERS} & self.model_fields_set
        if self.urls and named:
            raise ValueError(
                f"placement.engine.{sorted(named)[0]} is for servers that Forage starts, and "
                "placement.engine.urls names servers that run already; remove one of them"
            )
        return self


class SglangPlacement(ServerPlacement):
    """Servers of SGLang that the user has started."""

    kind: Literal["sglang"] = "sglang"
    transfer: Literal["group", "disk"] = "disk"
    """How weights travel: a torch process group, or files that both see."""

    @model_validator(mode="after")
    def _nccl_has_gpus_to_itself(self) -> Self:
        if self.offload and self.transfer == "group":
            raise ValueError(
                "placement.engine.offload shares GPUs with the trainer, and placement.engine."
                "transfer: group needs others than the trainer's: set transfer to disk"
            )
        return self

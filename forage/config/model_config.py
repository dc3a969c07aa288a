"""The settings of ``model``: the policy's weights, adapters beside them, or a server that has them.

``run_config.py`` hangs them under its root, and refuses a server's policy to what needs weights.
Nothing is loaded here.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forage.config.endpoint_config import EndpointConfig
from forage.settings import Frozen

KEYS_OF_WEIGHTS = ("dtype", "device", "gradient_checkpointing", "lora")
"""Keys of ``model`` that are read where the weights are loaded here."""


class LoraConfig(Frozen):
    """Adapters of rank ``rank`` beside linear layers, scaled by ``alpha / rank``.

    ``target_modules`` are names of layers such as q_proj; none named is every linear layer of the
    blocks. ``dropout`` is for ``forage sft`` alone.
    """

    rank: int = Field(default=16, ge=1)
    """The rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The share of the adapters' input that forage sft drops."""
    target_modules: tuple[str, ...] = ()
    """Names of layers such as q_proj; none: every linear layer of the blocks."""


class ModelConfig(Frozen):
    """The policy: an ordinary Hugging Face directory or hub id, or a directory of adapters.

    With ``lora``, ``train`` and ``sft`` leave its weights as they are and learn adapters. With
    ``endpoint`` a server samples instead (``forage eval`` and ``forage play``), and ``path`` names
    the tokenizer alone.
    """

    path: str
    """A Hugging Face directory or hub id, or a directory of adapters."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the weights."""
    device: str = "cpu"
    """Where the weights are, for example cpu or cuda."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, to save memory."""
    lora: LoraConfig | None = None
    """Learn adapters and leave the weights as they are; null: learn the weights."""
    endpoint: EndpointConfig | None = None
    """A server that samples instead, for forage eval and play; null: none."""

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        if self.endpoint is not None:
            for name in sorted(set(KEYS_OF_WEIGHTS) & self.model_fields_set):
                raise ValueError(
                    f"model.{name} does nothing with model.endpoint, where a server has the "
                    "weights; remove it"
                )
        return self

"""Converts Megatron's weights of Qwen2, Qwen3 and Llama models to Hugging Face's names.

Megatron stores queries, keys and values in one matrix, group by group ([groups, queries per group +
2, head size] rows), gate and up projection in another, and pads the vocabulary. Layers are numbered
(``decoder.layers.3.mlp...``) or stacked in the first dimension (``decoder.layers.mlp...``). Weights
are sliced when they are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Self

from torch import Tensor
from transformers import PretrainedConfig

from forage.errors import UserError
from forage.training.layouts.stored import Stored, Weights, joined, reshaped, row_of, rows_of

_NAME = re.compile(r"(?:(?:module|model)\.)*((?:embedding|decoder|output_layer)\..+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_STACK = re.compile(r"decoder\.layers\.(\D.*)")
_LEFT_OUT = ("_extra_state", "inv_freq")

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight",
    "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
}


def is_megatron(weights: Weights) -> bool:
    """Whether the names are Megatron's."""
    return any(_NAME.fullmatch(name) for name in weights)


def plain_names(weights: Weights) -> dict[str, Stored]:
    """The model's weights without name prefixes, leaving out everything else."""
    found = {name: match[1] for name in weights if (match := _NAME.fullmatch(name))}
    return {
        plain: weights[name]
        for name, plain in found.items()
        if not any(word in plain for word in _LEFT_OUT)
    }


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes that determine the row layout of queries, keys and values."""

    num_groups: int
    num_queries: int
    head_dim: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(groups, heads // groups, head_dim)

    @property
    def num_rows(self) -> int:
        return self.num_groups * (self.num_queries + 2) * self.head_dim


def from_megatron(weights: Weights, config: PretrainedConfig) -> dict[str, Stored]:
    """The weights as Hugging Face names and splits them; raises ``UserError`` for unknown ones."""
    heads, vocabulary = Heads.of(config), config.vocab_size
    renamed: dict[str, Stored] = {}
    for name, stored in _unstacked(plain_names(weights)).items():
        if name in _TOP:
            if name != "decoder.final_layernorm.weight":
                if stored.num_rows < vocabulary:
                    raise UserError(
                        f"{name} has {stored.num_rows} rows, but the config's vocab_size is "
                        f"{vocabulary}: the config belongs to another model"
                    )
                stored = rows_of(stored, 0, vocabulary)  # the rest is padding
            renamed[_TOP[name]] = stored
            continue
        match = _LAYER.fullmatch(name)
        renamed |= _of_layer(match[1], match[2], stored, heads) if match else {name: stored}
    return renamed


def _unstacked(weights: Weights) -> dict[str, Stored]:
    single: dict[str, Stored] = {}
    for name, stored in weights.items():
        if match := _STACK.fullmatch(name):
            for layer in range(stored.num_rows):
                single[f"decoder.layers.{layer}.{match[1]}"] = row_of(stored, layer)
        else:
            single[name] = stored
    return single


def _of_layer(layer: str, name: str, stored: Stored, heads: Heads) -> dict[str, Stored]:
    prefix = f"model.layers.{layer}."
    if name in _IN_LAYER:
        return {prefix + _IN_LAYER[name]: stored}
    kind = name.rpartition(".")[2]
    if name.startswith("self_attention.linear_qkv.") and kind in ("weight", "bias"):
        if stored.num_rows != heads.num_rows:
            raise UserError(
                f"layer {layer}: {name} has {stored.num_rows} rows, but the config's heads need "
                f"{heads.num_rows}: the config belongs to another model"
            )
        parts = {"q": (0, heads.num_queries), "k": (heads.num_queries, 1)}
        parts["v"] = (heads.num_queries + 1, 1)
        return {
            f"{prefix}self_attn.{letter}_proj.{kind}": _heads(stored, heads, *part)
            for letter, part in parts.items()
        }
    if name == "mlp.linear_fc1.weight":
        half = stored.num_rows // 2
        return {
            f"{prefix}mlp.gate_proj.weight": rows_of(stored, 0, half),
            f"{prefix}mlp.up_proj.weight": rows_of(stored, half, 2 * half),
        }
    raise UserError(
        f"layer {layer} has the weight {name}, which cannot be converted: only dense Qwen2, Qwen3 "
        "and Llama models are supported"
    )


def _heads(stored: Stored, heads: Heads, first: int, num: int) -> Stored:
    """Heads ``first`` to ``first + num`` of each group, group after group."""
    rest = stored.shape[1:]
    shape = (heads.num_groups * num * heads.head_dim, *rest)

    def cut(whole: Tensor) -> Tensor:
        by_group = whole.view(heads.num_groups, heads.num_queries + 2, heads.head_dim, *rest)
        return by_group[:, first : first + num].reshape(shape)

    return reshaped(stored, shape, cut)


def join_tensor_parallel(name: str, parts: list[Stored]) -> Stored:
    """Joins the parts of a weight that tensor-parallel ranks hold, depending on its name."""
    if any(word in name for word in ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings")):
        return joined(parts, 0)
    if name.startswith("output_layer."):
        return joined(parts, 0)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return joined(parts, 1)
    if name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        # Each rank has its part of the gate, then its part of the up projection.
        halves = [part.num_rows // 2 for part in parts]
        gates = [rows_of(part, 0, half) for part, half in zip(parts, halves, strict=True)]
        ups = [rows_of(p, half, p.num_rows) for p, half in zip(parts, halves, strict=True)]
        return joined([*gates, *ups], 0)
    if any(part.shape != parts[0].shape for part in parts) or not prod(parts[0].shape):
        raise UserError(f"the ranks' parts of {name} have different shapes")
    return parts[0]

"""The sizes of the model that a vLLM server has, read from its workers' drawing of it.

A server without Forage's receiver has no other way to say them: its settings name a folder, which
an update changes. The words are those of vLLM 0.32; a size that is not found is not compared.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZES = {
    "vocab_size": r"VocabParallelEmbedding\w*\(.*?org_vocab_size=(\d+)",
    "hidden_size": r"VocabParallelEmbedding\w*\(.*?embedding_dim=(\d+)",
    "intermediate_size": r"\(down_proj\): \w+\(in_features=(\d+)",
    "num_attention_heads": r"\bAttention\(head_size=\d+, num_heads=(\d+)",
    "num_key_value_heads": r"\bAttention\(head_size=\d+, num_heads=\d+, num_kv_heads=(\d+)",
}
"""Where each size stands, under its name in ``config.json``."""
_CUT = {"intermediate_size", "num_attention_heads", "num_key_value_heads"}
"""Those of which each of several GPUs tells its own part."""
_LAYERS = re.compile(r"^ *\(\d[\d, -]*\): (?:(\d+) x )?\w+DecoderLayer\(", re.MULTILINE)
_NUM_GPUS = re.compile(r"tp_size=(\d+)")


def other_sizes(drawing: str, config: PretrainedConfig) -> list[str]:
    """How the drawn model differs from one of this configuration, a sentence each."""
    mine = config.get_text_config().to_dict()
    return [
        f"{name} is {size} there and {mine[name]} here"
        for name, size in sizes_of(drawing).items()
        if isinstance(mine.get(name), int) and mine[name] != size
    ]


def sizes_of(drawing: str) -> dict[str, int]:
    """The sizes that are found, by their names in ``config.json``."""
    is_cut = any(int(number) > 1 for number in _NUM_GPUS.findall(drawing))
    has_experts = "MoE" in drawing  # an expert's inner size has another name
    sizes: dict[str, int] = {}
    for name, pattern in _SIZES.items():
        left_out = (is_cut and name in _CUT) or (has_experts and name == "intermediate_size")
        if not left_out and (found := re.search(pattern, drawing)):
            sizes[name] = int(found[1])
    num_layers = sum(int(number or 1) for number in _LAYERS.findall(drawing))
    if num_layers and "PPMissingLayer" not in drawing:  # else the others are elsewhere
        sizes["num_hidden_layers"] = num_layers
    return sizes

"""Tensor parallelism: shards the matrices of each block over ranks, by the names of its layers.

Queries, keys, values, gate and up are sharded by outputs, the two layers that follow by inputs, so
that a block sums over ranks twice (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).
Qwen2, Qwen3 and Llama use the same layer names. Norms, embeddings and the head stay whole on every
rank. The adapters (LoRA) of a sharded layer are sharded on the same side.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from forage.errors import UserError

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
_OF_A_HEAD = ("q_norm", "k_norm")
_ADAPTER = "default"
KNOWN = ("qwen2", "qwen3", "llama")


def check_divisible(model: PreTrainedModel, num_ranks: int, key: str) -> None:
    """Raises ``UserError`` if the matrices of ``model`` cannot be sharded over ``num_ranks``."""
    config = model.config
    check_type(config.model_type, num_ranks, key)
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    check_counts({name: getattr(config, name) for name in names}, num_ranks, key)


def check_type(model_type: str, num_ranks: int, key: str) -> None:
    """Raises ``UserError`` if there is no sharding plan for the model type."""
    if num_ranks > 1 and model_type not in KNOWN:
        raise UserError(
            f"{key} is {num_ranks}, but models of the type {model_type} cannot be sharded (only "
            f"{', '.join(KNOWN)}): set it to 1"
        )


def check_counts(counts: Mapping[str, int], num_ranks: int, key: str) -> None:
    """Raises ``UserError`` naming the first size that ``num_ranks`` does not divide."""
    for name, count in counts.items():
        if count % num_ranks:
            raise UserError(
                f"{key} is {num_ranks}, which does not divide the model's {name} ({count}): set it "
                "to a divisor"
            )


def cut_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the linear layers of a transformer block over the ranks of ``mesh``, in place."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in block.named_modules():
        layer = name.rpartition(".")[2]
        has_adapter = hasattr(module, "base_layer")
        if layer in _BY_OUTPUTS:
            plan |= {f"{name}{part}": ColwiseParallel() for part in _parts(has_adapter, "lora_B")}
        elif layer in _BY_INPUTS:
            plan |= {f"{name}{part}": RowwiseParallel() for part in _parts(has_adapter, "lora_A")}
        elif (
            layer in _OF_A_HEAD
        ):  # [1, N, H, D]: the weight is whole, its inputs are sharded by heads
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    requires_grad = {name: weight.requires_grad for name, weight in block.named_parameters()}
    parallelize_module(block, mesh, plan)
    for name, weight in block.named_parameters():  # parallelize_module sets it for norms
        weight.requires_grad_(requires_grad[name])


def _parts(has_adapter: bool, cut: str) -> tuple[str, ...]:
    return (".base_layer", f".{cut}.{_ADAPTER}") if has_adapter else ("",)

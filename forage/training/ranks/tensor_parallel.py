"""Tensor parallelism: the matrices of each block cut over ranks, by a plan of its layers' names.

Queries, keys, values, gate and up are cut by their outputs, the two that follow by their inputs, so
that a block sums over ranks twice (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).
Qwen2, Qwen3 and Llama name their layers alike. Norms, embeddings and the head stay whole on every
rank. Beside a cut layer its adapters (LoRA) are cut on the same side.
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
    """Raise ``UserError`` where the matrices of ``model`` cannot be cut over so many ranks."""
    config = model.config
    check_type(config.model_type, num_ranks, key)
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    check_counts({name: getattr(config, name) for name in names}, num_ranks, key)


def check_type(model_type: str, num_ranks: int, key: str) -> None:
    """Raise ``UserError`` where matrices are to be cut and no plan names the layers of the type."""
    if num_ranks > 1 and model_type not in KNOWN:
        raise UserError(
            f"{key} is {num_ranks}, and there is no plan for a model of the type {model_type} "
            f"(there is one for {', '.join(KNOWN)}): set it to 1"
        )


def check_counts(counts: Mapping[str, int], num_ranks: int, key: str) -> None:
    """Raise ``UserError`` where so many ranks do not divide one of a model's numbers, by name."""
    for name, count in counts.items():
        if count % num_ranks:
            raise UserError(
                f"{key} is {num_ranks}, which does not divide the model's {name} ({count}): set it "
                "to a divisor"
            )


def cut_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the linear layers of a transformer block over the ranks of ``mesh``, in place."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in block.named_modules():
        layer = name.rpartition(".")[2]
        has_adapter = hasattr(module, "base_layer")
        if layer in _BY_OUTPUTS:
            plan |= {f"{name}{part}": ColwiseParallel() for part in _parts(has_adapter, "lora_B")}
        elif layer in _BY_INPUTS:
            plan |= {f"{name}{part}": RowwiseParallel() for part in _parts(has_adapter, "lora_A")}
        elif layer in _OF_A_HEAD:  # [1, N, H, D]: the weight is whole, its inputs are cut by heads
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    is_learnt = {name: weight.requires_grad for name, weight in block.named_parameters()}
    parallelize_module(block, mesh, plan)
    for name, weight in block.named_parameters():  # a norm comes back as if it were learnt
        weight.requires_grad_(is_learnt[name])


def _parts(has_adapter: bool, cut: str) -> tuple[str, ...]:
    return (".base_layer", f".{cut}.{_ADAPTER}") if has_adapter else ("",)

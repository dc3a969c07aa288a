"""Decoder layers whose single operations torch.compile fuses, for the trainer and the engine alike.

Between its products a layer has some thirty operations that each read and write everything once:
on a GPU a fifth of a training step and a third of a decoded token (benchmarks/scale.md). A layer
is compiled on its own, once for all layers, which takes seconds where a whole model takes minutes.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from forage import attention

_KINDS = 64
"""Variants of a layer that are kept: with and without gradients, and for each kind of attention."""


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Have the decoder layers of ``model`` compiled at their first call; in place.

    Attention stays what the caller passes: it is called between compiled parts.
    """
    torch._dynamo.config.recompile_limit = _KINDS
    layers = getattr(model.base_model, "layers", ())
    assert isinstance(layers, nn.ModuleList), "a causal language model has its blocks in layers"
    attention.install(model)
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.delegate))
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether ``compile_layers`` was called for it."""
    layers = getattr(model.base_model, "layers", ())
    return any(layer._compiled_call_impl is not None for layer in layers)

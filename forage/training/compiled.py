"""Decoder layers whose single operations torch.compile fuses, for the trainer and the engine alike.

Between its products a layer has some thirty operations that each read and write everything once:
on a GPU a fifth of a training step and a third of a decoded token (benchmarks/scale.md). A layer
is compiled on its own, once for all layers, which takes seconds where a whole model takes minutes.
Layers that compute their activations again learn as they are: torch compiles nothing in there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from forage.models import attention

_KINDS = 64
"""Variants of a layer that are kept: with and without gradients, and for each kind of attention."""


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Have the decoder layers of ``model`` compiled at their first call; in place.

    Attention stays what the caller passes: it is called between compiled parts.
    """
    layers = getattr(model.base_model, "layers", ())
    assert isinstance(layers, nn.ModuleList), "a causal language model has its blocks in layers"
    attention.install(model)
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.delegate))
    for layer in layers:
        compiled = torch.compile(layer._call_impl, dynamic=True, backend=backend)
        layer._compiled_call_impl = _keeping_all(compiled)  # as ``layer.compile`` does


def _keeping_all(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` on a thread that keeps all variants: torch's limit is one of each thread.

    The engine's and the trainer's compile, and autograd's where it computes a layer again.
    """

    @wraps(call)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.config.recompile_limit = _KINDS
        return call(*args, **kwargs)

    return keeping


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether ``compile_layers`` was called for it."""
    layers = getattr(model.base_model, "layers", ())
    return any(layer._compiled_call_impl is not None for layer in layers)

"""Products in bfloat16 over float32 weights: small updates are kept, and the arithmetic is fast.

What torch's autocast does, put around the model itself, so that the trainer and the engine in this
process compute the same: https://arxiv.org/abs/1710.03740, section 3.1 (master weights). Where no
gradient is wanted, the weights' copies in bfloat16 are kept until an optimizer step changes them;
autocast alone would make them anew for every sampled token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make the body and the head of ``model`` multiply in ``dtype``; norms and sums stay."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            setattr(module, "forward", _CastLinear(module, dtype))  # noqa: B010 # no method
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    kind = model.device.type
    for module in (model.base_model, head):
        setattr(module, "forward", _WithinAutocast(module.forward, kind, dtype))  # noqa: B010


class _CastLinear:
    """The forward of a linear layer, whose cast weight is kept while the weight is the same."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        self._layer, self._dtype = layer, dtype
        self._kept: Tensor | None = None
        self._kept_of: tuple[int, int] | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        weight = self._layer.weight
        if not torch.is_grad_enabled():
            now = (weight.data_ptr(), weight._version)
            if self._kept is None or self._kept_of != now:
                self._kept, self._kept_of = weight.to(self._dtype), now
            weight = self._kept
        return linear(inputs, weight, self._layer.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CastLinear:
        """A copy's own layer, and no copy of what is kept."""
        return _CastLinear(copy.deepcopy(self._layer, memo), self._dtype)


class _WithinAutocast:
    """A forward under autocast; an object and no function, so that a copied model calls its own."""

    def __init__(self, forward: Callable[..., Any], kind: str, dtype: torch.dtype) -> None:
        self._forward, self._kind, self._dtype = forward, kind, dtype

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast(self._kind, self._dtype):
            return self._forward(*inputs, **named)

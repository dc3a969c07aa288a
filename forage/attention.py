"""One attention function for transformers' models, which asks the caller what to attend to.

The engine keeps keys and values in slots; the trainer lays sequences end to end. Both pass an
``attend`` callable to the model's forward call, and every architecture that routes its attention
through transformers' interface works with both. This file knows neither of them; it holds the one
sum that both must compute in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "forage"
KEY_BLOCK = 192
"""Keys whose values are summed in one product; a multiple of every padding of keys."""


class Attend(Protocol):
    """Attention of one layer: queries, keys and values in, one vector for each query out."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """``query`` [B, H, T, D]; ``key`` and ``value`` [B, H_kv, T, D] -> [B, T, H, D]."""
        ...


def mix_values(weights: Tensor, values: Tensor) -> Tensor:
    """Attention's weighted sum: [..., T, L] times [..., L, D] -> [..., T, D].

    Keys are taken in blocks, and the blocks' products added from the first to the last. A kernel
    cuts a product over many keys into blocks anyhow (of 512 in oneDNN, of 192 in MKL, on AMD EPYC);
    other blocks in sampler and trainer would differ in the last bit, which a model with sharp
    attention turns into 1e-4.
    """
    blocks = zip(weights.split(KEY_BLOCK, dim=-1), values.split(KEY_BLOCK, dim=-2), strict=True)
    first, *others = (weights_block @ values_block for weights_block, values_block in blocks)
    return sum(others, start=first)


def delegate(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attend: Attend,
    dropout: float = 0.0,
    **_ignored: Any,  # transformers passes settings of other implementations along
) -> tuple[Tensor, None]:
    """What transformers calls for a layer's attention: the ``attend`` of the forward call."""
    assert attention_mask is None, "masks belong to the attend callable"
    assert dropout == 0.0, "dropout would make the trainer disagree with the sampler"
    layer = module.layer_idx
    assert isinstance(layer, int), "transformers numbers its attention layers"
    return attend(layer, query, key, value, scaling), None


def install(model: nn.Module) -> None:
    """Make ``model`` (a transformers model) call the ``attend`` given to its forward."""
    from transformers import AttentionInterface

    if NAME not in AttentionInterface().valid_keys():  # compiled models have put theirs there
        AttentionInterface.register(NAME, delegate)
    model.set_attn_implementation(NAME)  # pyright: ignore[reportCallIssue]  # PreTrainedModel's

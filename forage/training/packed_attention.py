"""Attention over sequences laid end to end: each sees itself alone, causally.

The trainer's counterpart of the engine's slots. The cost is the sum of the sequences' own costs,
without padding to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from forage.attention import mix_values

KEY_MULTIPLE = 16
QUERY_BLOCK = 192
"""Queries are taken in blocks, so that the masked half of the scores is mostly not computed."""
MIN_QUERY_ROWS = 16
"""A shorter block is filled up: products with 1 to 3 rows take another kernel, with other sums."""


class PackedAttend:
    """Causal attention within each of the sequences that share one row."""

    def __init__(self, starts_S1: Sequence[int]) -> None:
        self._lengths = [end - start for start, end in pairwise(starts_S1)]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        attend = _attend_cpu if query.device.type == "cpu" else _attend_fused
        parts = [
            attend(query_T, key_T, value_T, scaling)
            for query_T, key_T, value_T in zip(
                query.split(self._lengths, dim=2),
                key.split(self._lengths, dim=2),
                value.split(self._lengths, dim=2),
                strict=True,
            )
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention by torch's kernels; of those that keep no scores, only one takes float32.

    That one wants a key head for each query head. Under autocast only the values tell the type:
    the rotation leaves queries and keys in float32.
    """
    group = query.shape[1] // key.shape[1]
    if group > 1 and value.dtype == torch.float32:
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        group = 1
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=group > 1
    )


def _attend_cpu(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The same by matrix products: on a CPU twice as fast as the fused kernel, with gradients."""
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.reshape(num_kv_heads, num_heads // num_kv_heads, num_tokens, head_dim) * scaling
    # Keys are padded to whole vectors: over a remainder, a softmax would differ in its last bits
    # from the engine's, which always sums over whole buckets.
    padding = -num_tokens % KEY_MULTIPLE
    keys_t = pad(key.transpose(0, 1).transpose(-1, -2), (0, padding))
    values = pad(value.transpose(0, 1), (0, 0, 0, padding))
    num_in_last = (num_tokens - 1) % QUERY_BLOCK + 1
    num_rows = num_tokens + max(0, MIN_QUERY_ROWS - num_in_last)
    grouped = pad(grouped, (0, 0, 0, num_rows - num_tokens))
    blocks = []
    for start in range(0, num_rows, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, num_rows)
        width = min(end, num_tokens)
        width += -width % KEY_MULTIPLE
        scores = grouped[:, :, start:end] @ keys_t[..., :width]
        is_hidden = torch.ones(end - start, width, dtype=torch.bool).triu_(start + 1)
        bias = torch.zeros(is_hidden.shape, dtype=scores.dtype).masked_fill_(
            is_hidden, float("-inf")
        )
        blocks.append(mix_values((scores + bias).softmax(dim=-1), values[..., :width, :]))
    attended = torch.cat(blocks, dim=2)[:, :, :num_tokens]
    return attended.reshape(1, num_heads, num_tokens, head_dim)

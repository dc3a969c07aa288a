"""Causal attention over sequences laid end to end, each of which sees only itself.

This is the trainer's counterpart of the engine's slots. The cost is the sum of the sequences' own
costs, without padding to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from forage.models.attention import KEY_BLOCK, Scoring, mix_values, weights_of
from forage.models.recurrence import RecurrentStates

KEY_MULTIPLE = 16
QUERY_BLOCK = 192
"""Queries per block; blocks avoid computing most of the masked half of the scores."""
MIN_QUERY_ROWS = 16
"""Shorter blocks are padded: products with 1 to 3 rows use another kernel, with other sums."""


class PackedAttend:
    """Causal attention within each sequence of one row."""

    def __init__(self, starts_S1: Sequence[int]) -> None:
        self._lengths = [end - start for start, end in pairwise(starts_S1)]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        # Fused kernels support neither soft caps nor sinks, and windows only with a full mask.
        is_fused = query.device.type != "cpu" and scoring.is_plain
        attend = _attend_fused if is_fused else _attend_by_products
        parts = [
            attend(query_T, key_T, value_T, scoring)
            for query_T, key_T, value_T in zip(
                query.split(self._lengths, dim=2),
                key.split(self._lengths, dim=2),
                value.split(self._lengths, dim=2),
                strict=True,
            )
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    def recur(
        self,
        layer: str,
        run: Callable[[Tensor, RecurrentStates | None], Tensor],
        hidden: Tensor,
    ) -> Tensor:
        """A recurrent layer's output [1, N, H], each sequence from a new state."""
        parts = [run(part, None) for part in hidden.split(self._lengths, dim=1)]
        return torch.cat(parts, dim=1)


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention by torch's kernels; only one that keeps no scores supports float32.

    That kernel needs a key head for each query head. Under autocast only the values show the type,
    because the rotation leaves queries and keys in float32.
    """
    group = query.shape[1] // key.shape[1]
    if group > 1 and value.dtype == torch.float32:
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        group = 1
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scoring.scaling, enable_gqa=group > 1
    )


def _attend_by_products(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention by matrix products: on a CPU twice as fast as the fused kernel, with gradients."""
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    grouped = query.reshape(num_kv_heads, group, num_tokens, head_dim) * scoring.scaling
    # Keys are padded to whole vectors: with a remainder, the softmax would differ in its last bits
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
        # Only whole blocks of keys that no query sees are skipped, so sums keep their order.
        first = scoring.first_key(start) // KEY_BLOCK * KEY_BLOCK
        scores = grouped[:, :, start:end] @ keys_t[..., first:width]
        is_hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(start + 1 - first)
        if scoring.window is not None:
            is_hidden |= torch.ones_like(is_hidden).tril_(start - scoring.window - first)
        bias = torch.zeros_like(scores[0, 0]).masked_fill_(is_hidden, float("-inf"))
        weights = weights_of(scores, bias, scoring, (num_kv_heads, group, 1, 1))
        blocks.append(mix_values(weights, values[..., first:width, :]))
    attended = torch.cat(blocks, dim=2)[:, :, :num_tokens]
    return attended.reshape(1, num_heads, num_tokens, -1)

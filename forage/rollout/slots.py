"""Keys and values of the episodes in flight: one slot each, and attention over slots.

A slot holds an episode from its prompt to its answer, so a new turn costs the tokens of the last
observation alone. Shapes are chosen so that a row's result depends on nothing but the row: decode
runs on tiles of neighbouring slots with a fixed number of rows, prefill on one slot at lengths
rounded up to a bucket, and keys beyond a row's length weigh exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH_BUCKET = 64


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the keys of a model look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class SlotCache:
    """Keys and values [num_slots, H_kv, capacity, D] a layer, and one scratch position a slot."""

    def __init__(
        self,
        shape: CacheShape,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = _round_up(capacity, LENGTH_BUCKET)
        # Rows of a tile that do not decode write to a position that nobody reads.
        self.scratch = self.capacity
        length = self.capacity + LENGTH_BUCKET
        size = (num_slots, shape.num_kv_heads, length, shape.head_dim)
        self.keys = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def copy_out(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of the first ``length`` positions of a slot, a pair a layer."""
        return [
            (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def copy_in(self, slot: int, layers: list[tuple[Tensor, Tensor]]) -> None:
        """Write what ``copy_out`` gave into the first positions of a slot."""
        for (keys, values), all_keys, all_values in zip(
            layers, self.keys, self.values, strict=True
        ):
            all_keys[slot, :, : keys.shape[1]] = keys
            all_values[slot, :, : values.shape[1]] = values


class PrefillAttend:
    """Attention of ``num_tokens`` new tokens of one slot over what it holds and themselves."""

    def __init__(self, cache: SlotCache, slot: int, start: int, num_tokens: int) -> None:
        self._cache = cache
        self._slot = slot
        self._span = slice(start, start + num_tokens)
        device = cache.keys[0].device
        query_positions_T1 = torch.arange(start, start + num_tokens, device=device)[:, None]
        self._is_visible_TL = torch.arange(start + num_tokens, device=device) <= query_positions_T1

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slot, :, self._span] = key[0]
        values[self._slot, :, self._span] = value[0]
        end = self._span.stop
        attended = torch.nn.functional.scaled_dot_product_attention(
            query,
            keys[self._slot : self._slot + 1, :, :end],
            values[self._slot : self._slot + 1, :, :end],
            attn_mask=self._is_visible_TL,
            scale=scaling,
            enable_gqa=True,
        )
        return attended.transpose(1, 2)


class DecodeAttend:
    """Attention of one new token for each row of a tile of slots.

    ``positions_R`` is where each row's new token stands, ``SlotCache.scratch`` for a row that does
    not decode. Written as two matrix products, because they give a row the same bits whatever the
    padded length and whatever the other rows hold; the fused kernel does not.
    """

    def __init__(self, cache: SlotCache, tile: slice, positions_R: Tensor) -> None:
        self._cache = cache
        self._tile = tile
        self._rows_R = torch.arange(tile.start, tile.stop, device=positions_R.device)
        self._positions_R = positions_R
        is_active_R = positions_R != cache.scratch
        lengths_R = torch.where(is_active_R, positions_R + 1, torch.ones_like(positions_R))
        self._length = min(_round_up(int(lengths_R.max()), LENGTH_BUCKET), cache.capacity)
        hidden_RL = torch.arange(self._length, device=positions_R.device) >= lengths_R[:, None]
        bias_RL = torch.zeros(hidden_RL.shape, dtype=cache.keys[0].dtype, device=hidden_RL.device)
        self._bias_R11L = bias_RL.masked_fill_(hidden_RL, float("-inf"))[:, None, None, :]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows_R, :, self._positions_R] = key[:, :, 0]
        values[self._rows_R, :, self._positions_R] = value[:, :, 0]
        keys_RKLD = keys[self._tile, :, : self._length]
        values_RKLD = values[self._tile, :, : self._length]
        num_rows, num_heads, _, head_dim = query.shape
        grouped = query.view(num_rows, keys_RKLD.shape[1], -1, head_dim) * scaling
        weights = (grouped @ keys_RKLD.transpose(-1, -2) + self._bias_R11L).softmax(dim=-1)
        return (weights @ values_RKLD).view(num_rows, 1, num_heads, head_dim)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

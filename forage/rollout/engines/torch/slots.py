"""Keys and values of the episodes in flight: one slot each, and attention over slots.

A slot holds an episode from its prompt to its answer, so a new turn costs the tokens of the last
observation alone. The attention here is that of ``fixed_forward``: decode runs on tiles of
neighbouring slots with a fixed number of rows, prefill on one slot at lengths rounded up to a
bucket, and keys beyond a row's length weigh exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forage.attention import mix_values

LENGTH_BUCKET = 64


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the keys of a model look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """New tokens of one slot and the position of the first; what comes before is in the cache.

    The last ``num_drafted`` of them are guesses of what will be sampled.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_drafted: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_known(self) -> int:
        return len(self.token_ids) - self.num_drafted

    @property
    def is_single(self) -> bool:
        """Whether one token is known, as where a turn goes on, and not a whole observation."""
        return self.num_known == 1


class SlotCache:
    """Keys [num_slots, H_kv, D, capacity] and values [num_slots, H_kv, capacity, D], by layer.

    Keys are kept transposed, as the product with the queries reads them. Each slot has a scratch
    position besides.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self.capacity = round_up(capacity, LENGTH_BUCKET)
        # Rows of a tile that do not decode write to a position that nobody reads.
        self.scratch = self.capacity
        length = self.capacity + LENGTH_BUCKET
        heads, dim = shape.num_kv_heads, shape.head_dim

        def zeros(*size: int) -> list[Tensor]:
            return [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]

        self.keys = zeros(num_slots, heads, dim, length)
        self.values = zeros(num_slots, heads, length, dim)

    def copy_out(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of the first ``length`` positions of a slot, a pair a layer."""
        return [
            (keys[slot, ..., :length].clone(), values[slot, :, :length].clone())
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def copy_in(self, slot: int, layers: list[tuple[Tensor, Tensor]]) -> None:
        """Write what ``copy_out`` gave into the first positions of a slot."""
        for (keys, values), all_keys, all_values in zip(
            layers, self.keys, self.values, strict=True
        ):
            all_keys[slot, ..., : keys.shape[2]] = keys
            all_values[slot, :, : values.shape[1]] = values


class PrefillAttend:
    """Attention of ``num_tokens`` new tokens of one slot over what it holds and themselves."""

    def __init__(self, cache: SlotCache, slot: int, start: int, num_tokens: int) -> None:
        self._cache = cache
        self._slot = slot
        self._span = slice(start, start + num_tokens)
        keys = cache.keys[0]
        query_positions_T1 = torch.arange(start, start + num_tokens, device=keys.device)[:, None]
        key_positions_L = torch.arange(start + num_tokens, device=keys.device)
        self._bias_TL = hiding_bias(key_positions_L > query_positions_T1, keys.dtype)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slot, ..., self._span] = key[0].transpose(-1, -2)
        values[self._slot, :, self._span] = value[0]
        end = self._span.stop
        _, num_heads, num_tokens, head_dim = query.shape
        keys_KDL = keys[self._slot, ..., :end]
        # [H_kv, G, T, D]: the query heads that share a key head stand together.
        grouped = query.reshape(keys_KDL.shape[0], -1, num_tokens, head_dim) * scaling
        weights = (grouped @ keys_KDL[:, None] + self._bias_TL).softmax(dim=-1)
        attended = mix_values(weights, values[self._slot, :, None, :end])
        return attended.reshape(1, num_heads, num_tokens, head_dim).transpose(1, 2)


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
        self._length = min(round_up(int(lengths_R.max()), LENGTH_BUCKET), cache.capacity)
        hidden_RL = torch.arange(self._length, device=positions_R.device) >= lengths_R[:, None]
        self._bias_R11L = hiding_bias(hidden_RL, cache.keys[0].dtype)[:, None, None, :]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows_R, :, :, self._positions_R] = key[:, :, 0]
        values[self._rows_R, :, self._positions_R] = value[:, :, 0]
        keys_RKDL = keys[self._tile, ..., : self._length]
        values_RKLD = values[self._tile, :, : self._length]
        num_rows, num_heads, _, head_dim = query.shape
        grouped = query.view(num_rows, keys_RKDL.shape[1], -1, head_dim) * scaling
        weights = (grouped @ keys_RKDL + self._bias_R11L).softmax(dim=-1)
        return mix_values(weights, values_RKLD).view(num_rows, 1, num_heads, head_dim)


def hiding_bias(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key may be seen, minus infinity where not."""
    bias = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return bias.masked_fill_(is_hidden, float("-inf"))


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below ``number``."""
    return -(-number // multiple) * multiple

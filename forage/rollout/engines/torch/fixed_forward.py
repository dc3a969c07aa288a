"""Passes whose shapes are always the same, for devices whose results depend on a batch's size.

Turns decode on tiles of a fixed number of slots, what is longer than a token runs at a length
rounded up to a bucket, and keys beyond a row's length weigh exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forage.attention import Attend, mix_values
from forage.config.rollout_config import EngineConfig
from forage.rollout.engines.torch.slots import (
    LENGTH_BUCKET,
    SlotCache,
    Stretch,
    hiding_bias,
    round_up,
)


class FixedForward:
    """A ``Forward`` in several passes, each of a shape that is always the same."""

    # A shape has one row for each slot, and no room for drafts.
    overhead_tokens = None
    rounds_ahead = 0

    def __init__(self, model: PreTrainedModel, cache: SlotCache, config: EngineConfig) -> None:
        assert cache.num_slots % config.tile_rows == 0, "tiles of neighbouring slots fill the cache"
        self._model = model
        self._cache = cache
        self._tile_rows = config.tile_rows
        self._bucket = config.prefill_bucket

    def __call__(self, stretches: Sequence[Stretch]) -> Tensor:
        """Logits [B, V] after the last token of each stretch, none of which is drafted."""
        logits: dict[int, Tensor] = {}
        singles = [stretch for stretch in stretches if len(stretch.token_ids) == 1]
        for stretch in stretches:
            if len(stretch.token_ids) > 1:
                logits[stretch.slot] = self._prefill(stretch)
        by_slot = sorted(singles, key=lambda stretch: stretch.slot)
        for tile, members in groupby(by_slot, lambda stretch: stretch.slot // self._tile_rows):
            rows = list(members)
            logits_RV = self._decode(tile * self._tile_rows, rows)
            logits |= {s.slot: logits_RV[s.slot % self._tile_rows] for s in rows}
        return torch.stack([logits[stretch.slot] for stretch in stretches])

    def take_tokens(self, slots: Sequence[int], tokens_B: Tensor) -> None:
        """They are read before the next round."""

    def take_weights(self) -> None:
        """It reads them anew in each pass."""

    def close(self) -> None:
        """It has no threads."""

    def _prefill(self, stretch: Stretch) -> Tensor:
        """Logits [V] after a stretch, computed at a length rounded up."""
        count = len(stretch.token_ids)
        num_tokens = round_up(count, self._bucket)
        token_ids = torch.zeros(1, num_tokens, dtype=torch.long)
        token_ids[0, :count] = torch.tensor(stretch.token_ids)
        positions = torch.arange(stretch.start, stretch.start + num_tokens)[None]
        attend = PrefillAttend(self._cache, stretch.slot, stretch.start, num_tokens)
        hidden = self._forward(token_ids, positions, attend)
        return self._logits(hidden[0, count - 1][None])[0]

    def _decode(self, first: int, rows: list[Stretch]) -> Tensor:
        """Logits [tile_rows, V] of a tile; the rows of slots that do not decode mean nothing."""
        token_ids_R1 = torch.zeros(self._tile_rows, 1, dtype=torch.long)
        positions_R = torch.full((self._tile_rows,), self._cache.scratch)
        for stretch in rows:
            token_ids_R1[stretch.slot - first, 0] = stretch.token_ids[0]
            positions_R[stretch.slot - first] = stretch.start
        positions_R = positions_R.to(self._cache.device)
        attend = DecodeAttend(self._cache, slice(first, first + self._tile_rows), positions_R)
        # A row that does not decode stands at the scratch position, which may lie past the
        # model's last; rotary embeddings are computed from the number, so that does no harm.
        hidden_R1H = self._forward(token_ids_R1, positions_R[:, None], attend)
        return self._logits(hidden_R1H[:, 0])

    def _forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        output = self._model.base_model(
            input_ids=token_ids.to(self._cache.device),
            position_ids=positions.to(self._cache.device),
            use_cache=False,
            attend=attend,
        )
        return output.last_hidden_state

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        head = self._model.get_output_embeddings()
        assert head is not None, "a causal language model has a head"
        return head(hidden_BH)


class PrefillAttend:
    """Attention of ``num_tokens`` new tokens of one slot over what it holds and themselves."""

    def __init__(self, cache: SlotCache, slot: int, start: int, num_tokens: int) -> None:
        self._cache = cache
        self._slot = slot
        self._span = slice(start, start + num_tokens)
        keys = cache.keys[0]
        query_positions_T1 = torch.arange(start, start + num_tokens, device=keys.device)[:, None]
        # Whole buckets, because a softmax over another remainder has other last bits.
        self._length = round_up(start + num_tokens, LENGTH_BUCKET)
        key_positions_L = torch.arange(self._length, device=keys.device)
        self._bias_TL = hiding_bias(key_positions_L > query_positions_T1, keys.dtype)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slot, ..., self._span] = key[0].transpose(-1, -2)
        values[self._slot, :, self._span] = value[0]
        _, num_heads, num_tokens, head_dim = query.shape
        keys_KDL = keys[self._slot, ..., : self._length]
        # [H_kv, G, T, D]: the query heads that share a key head stand together.
        grouped = query.reshape(keys_KDL.shape[0], -1, num_tokens, head_dim) * scaling
        weights = (grouped @ keys_KDL[:, None] + self._bias_TL).softmax(dim=-1)
        attended = mix_values(weights, values[self._slot, :, None, : self._length])
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
        keys[self._rows_R, :, :, self._positions_R] = key[:, :, 0].to(keys.dtype)
        values[self._rows_R, :, self._positions_R] = value[:, :, 0].to(keys.dtype)
        keys_RKDL = keys[self._tile, ..., : self._length]
        values_RKLD = values[self._tile, :, : self._length]
        num_rows, num_heads, _, head_dim = query.shape
        grouped = query.view(num_rows, keys_RKDL.shape[1], -1, head_dim) * scaling
        weights = (grouped @ keys_RKDL + self._bias_R11L).softmax(dim=-1)
        return mix_values(weights, values_RKLD).view(num_rows, 1, num_heads, head_dim)

"""One pass over everything that waits, on a CPU: single new tokens and whole observations together.

A small model's pass costs mostly what does not depend on the number of tokens, so decoding and
prefilling share it, laid end to end in one row; a large pass is cut in parts, one a core, because
the single operations are too short to be shared between cores. Attention alone is done slot by
slot. Exact only where rows do not depend on their company, which ``forward.rows_are_independent``
finds out.

Single tokens attend row by row, each to its own keys in place: memory is what decoding waits for,
and matrix products over a batch of slots copy what is strided and read up to the longest row. Sums
run in the order, and with the fused multiply-add, of the trainer's matrix products: a model whose
attention is sharp turns a last bit into a difference of 1e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from transformers import PreTrainedModel

from forage.attention import KEY_BLOCK, mix_values
from forage.config.rollout_config import EngineConfig
from forage.rollout.engines.torch.slots import (
    LENGTH_BUCKET,
    SlotCache,
    Stretch,
    hiding_bias,
    round_up,
)

MIN_PART_COST = 200
"""What a part has to cost to be worth a core, in tokens of an observation, for a small model."""
_SMALL_MODEL = 1_000_000
"""Parameters up to which that was measured; a token of a larger one is worth more."""
SINGLE_COST = 2
"""What a single new token costs, in tokens of an observation: it reads keys for itself alone."""
OVERHEAD_TOKENS = 24
"""What a pass without tokens would cost, in single tokens (benchmarks/engine.md)."""


class PackedForward:
    """A ``Forward`` over the tokens of all stretches at once."""

    overhead_tokens = OVERHEAD_TOKENS
    rounds_ahead = 0

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, config: EngineConfig, num_threads: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._multiple = config.tile_rows
        self._bucket = config.prefill_bucket
        self._num_threads = num_threads
        self._min_part_cost = min_part_cost(model.num_parameters(), self._multiple)
        self._pool = ThreadPoolExecutor(num_threads, "forage-engine", torch.set_num_threads, (1,))

    def __call__(self, stretches: Sequence[Stretch]) -> Tensor:
        """Logits [B, V] after the last known token and each drafted one of each stretch."""
        costs = [_cost(stretch) for stretch in stretches]
        parts = equal_parts(costs, self._num_threads, self._min_part_cost)
        if len(parts) == 1:
            return self._compute(stretches)
        logits = list(
            self._pool.map(lambda part: self._compute([stretches[i] for i in part]), parts)
        )
        ends = accumulate(1 + stretch.num_drafted for stretch in stretches)
        spans = [
            range(end - 1 - s.num_drafted, end) for end, s in zip(ends, stretches, strict=True)
        ]
        places = torch.tensor([row for part in parts for index in part for row in spans[index]])
        out_BV = torch.empty(len(places), logits[0].shape[1])
        out_BV[places] = torch.cat(logits)
        return out_BV

    def take_tokens(self, slots: Sequence[int], tokens_B: Tensor) -> None:
        """They are read before the next round."""

    def take_weights(self) -> None:
        """It reads them anew in each pass."""

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    @torch.inference_mode()
    def _compute(self, stretches: Sequence[Stretch]) -> Tensor:
        order = sorted(range(len(stretches)), key=lambda index: not stretches[index].is_single)
        laid = [stretches[index] for index in order]
        num_tokens = sum(len(stretch.token_ids) for stretch in laid)
        padding = [0] * (round_up(num_tokens, self._multiple) - num_tokens)
        ids = [token for stretch in laid for token in stretch.token_ids]
        positions = [place for s in laid for place in range(s.start, s.end)]
        hidden = self._model.base_model(
            input_ids=torch.tensor([ids + padding]),
            position_ids=torch.tensor([positions + padding]),
            use_cache=False,
            attend=SlotAttend(self._cache, laid, self._bucket),
        ).last_hidden_state[0]
        ends = np.empty(len(laid), dtype=np.int64)
        ends[order] = np.cumsum([len(stretch.token_ids) for stretch in laid])
        wanted = [
            row
            for end, stretch in zip(ends.tolist(), stretches, strict=True)
            for row in range(end - 1 - stretch.num_drafted, end)
        ]
        rows = torch.zeros(round_up(len(wanted), self._multiple), dtype=torch.long)
        rows[: len(wanted)] = torch.tensor(wanted)
        head = self._model.get_output_embeddings()
        assert head is not None, "a causal language model has a head"
        return head(hidden[rows])[: len(wanted)]


def min_part_cost(num_parameters: int, multiple: int) -> int:
    """What a part has to cost: less for a larger model, but the rows that it is padded to.

    ``min_part_cost(870_000, 16)`` gives 200, ``min_part_cost(134_515_008, 8)`` gives 16.
    """
    scaled = MIN_PART_COST * _SMALL_MODEL // max(num_parameters, 1)
    return min(MIN_PART_COST, max(scaled, SINGLE_COST * multiple))


def equal_parts(costs: Sequence[int], most: int, min_cost: int = MIN_PART_COST) -> list[list[int]]:
    """Indices in at most ``most`` parts of about equal cost, fewer where there is little work.

    ``equal_parts([90, 5, 60, 40], 2)`` gives ``[[0, 1], [2, 3]]``.
    """
    num_parts = max(1, min(most, sum(costs) // min_cost))
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        lightest = totals.index(min(totals))
        parts[lightest].append(index)
        totals[lightest] += costs[index]
    return [sorted(part) for part in parts if part]


def _cost(stretch: Stretch) -> int:
    num_tokens = len(stretch.token_ids)
    return SINGLE_COST * num_tokens if stretch.is_single else num_tokens


class SlotAttend:
    """Attention of stretches laid end to end (single tokens first), each over its own slot.

    A drafted token is one more single one: it sees the keys that the one before it has just left.
    """

    def __init__(self, cache: SlotCache, laid: Sequence[Stretch], bucket: int) -> None:
        self._cache = cache
        singles = [
            (stretch.slot, position)
            for stretch in laid
            if stretch.is_single
            for position in range(stretch.start, stretch.end)
        ]
        self._slots_R, self._positions_R = np.array(singles, dtype=np.int64).reshape(-1, 2).T.copy()
        self._longer: list[tuple[int, LongStretch]] = []
        offset = len(singles)
        for stretch in laid:
            if stretch.is_single:
                continue
            self._longer.append((offset, LongStretch(cache, stretch, bucket)))
            offset += len(stretch.token_ids)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        query_THD = query[0].transpose(0, 1).contiguous() * scaling
        key_TKD, value_TKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        out_THD = torch.zeros_like(query_THD)
        num_singles = len(self._slots_R)
        if num_singles:
            self._attend_singles(
                layer,
                query_THD[:num_singles].numpy(),
                key_TKD[:num_singles].numpy(),
                value_TKD[:num_singles].numpy(),
                out_THD[:num_singles].numpy(),
            )
        for offset, stretch in self._longer:
            span = slice(offset, offset + stretch.num_tokens)
            out_THD[span] = stretch.attend(layer, query_THD[span], key_TKD[span], value_TKD[span])
        return out_THD[None]

    def _attend_singles(
        self,
        layer: int,
        query_RHD: np.ndarray,
        key_RKD: np.ndarray,
        value_RKD: np.ndarray,
        out_RHD: np.ndarray,
    ) -> None:
        keys_SKDL = self._cache.keys[layer].numpy()
        values_SKLD = self._cache.values[layer].numpy()
        keys_SKDL[self._slots_R, :, :, self._positions_R] = key_RKD
        values_SKLD[self._slots_R, :, self._positions_R] = value_RKD
        attend_rows(
            query_RHD, keys_SKDL, values_SKLD, self._slots_R, self._positions_R + 1, out_RHD
        )


class LongStretch:
    """Attention of several new tokens of one slot over what it holds and themselves.

    Two matrix products whose shapes are rounded up, so that few different ones occur: making the
    kernel of a new shape takes longer than running it.
    """

    def __init__(self, cache: SlotCache, stretch: Stretch, bucket: int) -> None:
        self._cache = cache
        self._stretch = stretch
        self.num_tokens = len(stretch.token_ids)
        self._num_rows = round_up(self.num_tokens, bucket)
        self._length = min(round_up(stretch.end, LENGTH_BUCKET), cache.capacity)
        query_positions_T1 = torch.arange(stretch.start, stretch.start + self._num_rows)[:, None]
        self._bias_TL = hiding_bias(torch.arange(self._length) > query_positions_T1, cache.dtype)

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        """[T, H, D] for scaled queries of the same shape; keeps the keys and values."""
        span = slice(self._stretch.start, self._stretch.end)
        keys_KDL = self._cache.keys[layer][self._stretch.slot]
        values_KLD = self._cache.values[layer][self._stretch.slot]
        keys_KDL[:, :, span] = key_TKD.permute(1, 2, 0)
        values_KLD[:, span] = value_TKD.transpose(0, 1)
        num_heads, head_dim = query_THD.shape[1:]
        num_kv_heads = keys_KDL.shape[0]
        rows_HTD = query_THD.new_zeros(num_heads, self._num_rows, head_dim)
        rows_HTD[:, : self.num_tokens] = query_THD.transpose(0, 1)
        # The query heads that share a key head stand together.
        grouped = rows_HTD.view(num_kv_heads, -1, head_dim)
        scores = grouped @ keys_KDL[:, :, : self._length]
        scores.view(num_heads, self._num_rows, self._length).add_(self._bias_TL)
        attended = mix_values(scores.softmax(dim=-1), values_KLD[:, : self._length])
        attended_HTD = attended.view(num_heads, self._num_rows, head_dim)
        return attended_HTD[:, : self.num_tokens].transpose(0, 1)


def attend_rows(
    query_RHD: np.ndarray,
    keys_SKDL: np.ndarray,
    values_SKLD: np.ndarray,
    slots_R: np.ndarray,
    lengths_R: np.ndarray,
    out_RHD: np.ndarray,
) -> None:
    """Fill ``out_RHD``: row r attends to the first ``lengths_R[r]`` places of its slot.

    Arrays of float32, the queries scaled already, and of int64; S slots, H heads, K key heads.
    """
    num_rows, num_heads, _ = query_RHD.shape
    # Whole buckets, because a softmax over another remainder has other last bits.
    width = round_up(int(lengths_R.max()), LENGTH_BUCKET)
    scores = torch.empty(num_rows, num_heads, width)
    _score_rows(query_RHD, keys_SKDL, slots_R, lengths_R, scores.numpy())
    _mix_rows(scores.softmax(dim=-1).numpy(), values_SKLD, slots_R, lengths_R, out_RHD)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _score_rows(
    query_RHD: Any, keys_SKDL: Any, slots_R: Any, lengths_R: Any, scores_RHL: Any
) -> None:
    """Products of each query with its slot's keys; minus infinity beyond its length."""
    num_rows, num_heads, head_dim = query_RHD.shape
    group = num_heads // keys_SKDL.shape[1]
    for row in range(num_rows):
        length = lengths_R[row]
        for head in range(num_heads):
            keys_DL = keys_SKDL[slots_R[row], head // group]
            scores_L = scores_RHL[row, head]
            scores_L[:length] = 0.0
            # Along the keys, not along the dimension: sums that need no reordering to be vectors.
            for dim in range(head_dim):
                factor = query_RHD[row, head, dim]
                for place in range(length):
                    scores_L[place] += factor * keys_DL[dim, place]
            scores_L[length:] = -np.inf


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _mix_rows(
    weights_RHL: Any, values_SKLD: Any, slots_R: Any, lengths_R: Any, out_RHD: Any
) -> None:
    """Sums of each slot's values by weight, added as ``mix_values`` adds them.

    The heads that share values go along together: their sums do not wait for each other.
    """
    num_rows, num_heads, head_dim = out_RHD.shape
    num_kv_heads = values_SKLD.shape[1]
    group = num_heads // num_kv_heads
    mixed_GD = np.empty((group, head_dim), dtype=np.float32)
    for row in range(num_rows):
        for kv_head in range(num_kv_heads):
            values_LD = values_SKLD[slots_R[row], kv_head]
            out_GD = out_RHD[row, kv_head * group : (kv_head + 1) * group]
            weights_GL = weights_RHL[row, kv_head * group : (kv_head + 1) * group]
            out_GD[:] = 0.0
            for start in range(0, lengths_R[row], KEY_BLOCK):
                mixed_GD[:] = 0.0
                for place in range(start, min(start + KEY_BLOCK, lengths_R[row])):
                    for member in range(group):
                        weight = weights_GL[member, place]
                        for dim in range(head_dim):
                            mixed_GD[member, dim] += weight * values_LD[place, dim]
                out_GD += mixed_GD

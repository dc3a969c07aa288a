"""Attention over slots on a GPU, in Triton: one new token per slot, or blocks of new tokens.

A row's result depends only on its own queries, keys and length: keys are processed in blocks from
first to last, and a long row is split at fixed places (promise 7). The running sums follow
https://arxiv.org/abs/2205.14135, the split of keys over programs follows flash-decoding. Import
this file only if there are a GPU and Triton.

Keys are loaded in whole blocks, including those past a row's length: their scores are hidden, and a
slot's capacity is a multiple of every block. A mask along the keys would split each 16-byte load
into eight of 2 bytes. Values are masked, because 0 times NaN is NaN.
"""

# Kernel parameters are pointers and numbers, for which Triton has no types.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forage.rollout.engines.torch.graph_forward import QUERY_BLOCK
from forage.rollout.engines.torch.slots import SlotCache

_PART = 512
"""Keys per program when a single token attends."""
_MIN_ROWS = 16
"""The smallest matrix side of a tensor core; rows and dimensions are padded to it."""


class KernelAttention:
    """Attention of new tokens over a cache's slots; also stores their keys and values."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self._num_parts = -(-cache.capacity // _PART)
        is_float32 = cache.dtype == torch.float32
        # In float32, tensor cores would round products to 10 bits.
        self._precision = "ieee" if is_float32 else "tf32"
        # In float32, 64 keys of 128 dimensions do not fit in the registers.
        self._key_block, self._num_warps = (32, 4) if is_float32 else (64, 2)

    def attend_singles(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions_S: Tensor,
        scale: float,
    ) -> Tensor:
        """[S, H, D] for one new token per slot: ``query`` [S, H, D], ``key``, ``value`` [S, K, D].

        A slot whose position is the cache's scratch has no new token, and its row is meaningless.
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        num_slots, num_heads, dim = query.shape
        num_kv_heads = key.shape[1]
        group = num_heads // num_kv_heads
        mixed = query.new_empty((num_slots, num_heads, self._num_parts, dim), dtype=torch.float32)
        sums = query.new_empty((num_slots, num_heads, self._num_parts, 2), dtype=torch.float32)
        _attend_part[(num_slots, num_kv_heads, self._num_parts)](
            *(query, key, value, keys, values, positions_S, mixed, sums),
            scale,
            self._cache.scratch,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            H=num_heads,
            G=group,
            GP=max(_MIN_ROWS, triton.next_power_of_2(group)),
            D=dim,
            DP=max(_MIN_ROWS, triton.next_power_of_2(dim)),
            PART=_PART,
            BLOCK=self._key_block,
            PARTS=self._num_parts,
            PRECISION=self._precision,
            num_warps=self._num_warps,
            num_stages=2,
        )
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        _join_parts[(num_slots, num_heads)](
            *(mixed, sums, positions_S, out),
            self._cache.scratch,
            H=num_heads,
            D=dim,
            DP=triton.next_power_of_2(dim),
            PART=_PART,
            PARTS=self._num_parts,
            PARTS_P=triton.next_power_of_2(self._num_parts),
        )
        return out

    def attend_blocks(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slots_N: Tensor,
        positions_N: Tensor,
        lengths_B: Tensor,
        scale: float,
    ) -> Tensor:
        """[N, H, D] for new tokens in blocks of ``QUERY_BLOCK``, each block of one slot.

        ``query`` [N, H, D], ``key``, ``value`` [N, K, D]. ``lengths_B`` counts the keys of a
        block's slot up to the block's last token; 0 for an unused block.
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[slots_N, :, :, positions_N] = key
        values[slots_N, :, positions_N] = value
        num_tokens, num_heads, dim = query.shape
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        _attend_block[(num_tokens // QUERY_BLOCK, num_heads)](
            query,
            keys,
            values,
            slots_N,
            positions_N,
            lengths_B,
            out,
            scale,
            *query.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            H=num_heads,
            G=num_heads // key.shape[1],
            D=dim,
            DP=max(_MIN_ROWS, triton.next_power_of_2(dim)),
            QUERIES=QUERY_BLOCK,
            BLOCK=self._key_block,
            PRECISION=self._precision,
            num_warps=4,
            num_stages=2,
        )
        return out


@triton.jit
def _attend_part(
    query, key, value, keys, values, positions, mixed, sums, scale, scratch,
    q_row, q_head, k_row, k_head, v_row, v_head,
    ks_slot, ks_head, ks_dim, vs_slot, vs_head, vs_place,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one slot's new token over one part of its keys, for one key head's queries."""
    slot, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + slot)
    length = tl.where(position == scratch, 1, position + 1)
    start = part * PART
    if start >= length:
        return
    g, d, n = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK)
    is_head, is_dim = g < G, d < D
    is_used = is_head[:, None] & is_dim[None, :]
    heads = kv_head * G + g
    q_places = slot * q_row + heads[:, None] * q_head + d[None, :]
    q = tl.load(query + q_places, mask=is_used, other=0.0)
    base_k = keys + slot.to(tl.int64) * ks_slot + kv_head * ks_head
    base_v = values + slot.to(tl.int64) * vs_slot + kv_head * vs_head
    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    mix = tl.zeros([GP, DP], tl.float32)
    for at in range(start, tl.minimum(start + PART, length - 1), BLOCK):
        is_key = at + n < length - 1
        k_places = d[:, None] * ks_dim + (at + n)[None, :]
        k = tl.load(base_k + k_places, mask=is_dim[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        v_places = (at + n)[:, None] * vs_place + d[None, :]
        v = tl.load(base_v + v_places, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        top, total, mix = _add_block(scores, v, top, total, mix, PRECISION)
    if length <= start + PART:  # the last part: the new token sees itself, and is stored
        new_key = tl.load(key + slot * k_row + kv_head * k_head + d, mask=is_dim, other=0.0)
        new_value = tl.load(value + slot * v_row + kv_head * v_head + d, mask=is_dim, other=0.0)
        if position != scratch:
            tl.store(base_k + d * ks_dim + position, new_key, mask=is_dim)
            tl.store(base_v + position * vs_place + d, new_value, mask=is_dim)
        score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        higher = tl.maximum(top, score)
        weight, shrink = tl.exp(score - higher), tl.exp(top - higher)
        total = total * shrink + weight
        mix = mix * shrink[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
        top = higher
    row = (slot * H + heads) * PARTS + part
    tl.store(mixed + row[:, None] * D + d[None, :], mix, mask=is_used)
    tl.store(sums + row * 2, top, mask=is_head)
    tl.store(sums + row * 2 + 1, total, mask=is_head)


@triton.jit
def _add_block(scores, v, top, total, mix, PRECISION: tl.constexpr):
    """Adds a block of keys to the running maximum, the sum of weights and the weighted values."""
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - higher[:, None])
    shrink = tl.exp(top - higher)
    mix = mix * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * shrink + tl.sum(weights, 1), mix


@triton.jit
def _join_parts(
    mixed, sums, positions, out, scratch,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr,
):  # fmt: skip
    """Combines the parts of one slot and head, each by its share of the weights."""
    slot, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + slot)
    length = tl.where(position == scratch, 1, position + 1)
    p, d = tl.arange(0, PARTS_P), tl.arange(0, DP)
    is_part = p * PART < length
    row = (slot * H + head) * PARTS + p
    top = tl.load(sums + row * 2, mask=is_part, other=float("-inf"))
    total = tl.load(sums + row * 2 + 1, mask=is_part, other=0.0)
    share = tl.exp(top - tl.max(top, 0))
    is_used = is_part[:, None] & (d < D)[None, :]
    mix = tl.load(mixed + row[:, None] * D + d[None, :], mask=is_used, other=0.0)
    joined = tl.sum(mix * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + (slot * H + head) * D + d, joined, mask=d < D)


@triton.jit
def _attend_block(
    query, keys, values, slots, positions, lengths, out, scale,
    q_row, q_head, ks_slot, ks_head, ks_dim, vs_slot, vs_head, vs_place,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Causal attention of one block of a slot's new tokens, for one head."""
    block, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + block)
    i, d, n = tl.arange(0, QUERIES), tl.arange(0, DP), tl.arange(0, BLOCK)
    rows, is_dim = block * QUERIES + i, d < D
    own = tl.load(positions + rows)
    slot = tl.load(slots + block * QUERIES)
    q_places = rows[:, None] * q_row + head * q_head + d[None, :]
    q = tl.load(query + q_places, mask=is_dim[None, :], other=0.0)
    base_k = keys + slot * ks_slot + (head // G) * ks_head
    base_v = values + slot * vs_slot + (head // G) * vs_head
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mix = tl.zeros([QUERIES, DP], tl.float32)
    for at in range(0, length, BLOCK):
        place = at + n
        is_key = place < length
        k_places = d[:, None] * ks_dim + place[None, :]
        k = tl.load(base_k + k_places, mask=is_dim[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        is_seen = is_key[None, :] & (place[None, :] <= own[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        v_places = place[:, None] * vs_place + d[None, :]
        v = tl.load(base_v + v_places, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        top, total, mix = _add_block(scores, v, top, total, mix, PRECISION)
    mix = tl.where(length > 0, mix / total[:, None], 0.0)
    tl.store(out + (rows * H + head)[:, None] * D + d[None, :], mix, mask=is_dim[None, :])

"""Attention of single new tokens over slots, on a CPU: each row reads its own keys and no others.

Decoding reads every key and value of an episode once for each token, so memory is what it waits
for. Matrix products over a batch of slots copy what is strided and read up to the longest row;
these kernels read each row's own length in place. A row's bits depend on the row alone, because it
is computed alone. Sums run in the order, and with the fused multiply-add, of the trainer's matrix
products: a model whose attention is sharp turns a last bit into a difference of 1e-3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from forage.attention import KEY_BLOCK
from forage.rollout.engines.torch.slots import LENGTH_BUCKET, round_up


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

"""Attention of single new tokens over slots, on a CPU: each row reads its own keys and no others.

Decoding reads every key and value of an episode once for each token, so memory is what it waits
for. Matrix products over a batch of slots copy what is strided and read up to the longest row; this
kernel reads each row's own length in place. A row's bits depend on the row alone, because it is
computed alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, error_model="numpy")
def attend_rows(
    query_RHD: Any,
    keys_SKDL: Any,
    values_SKLD: Any,
    slots_R: Any,
    lengths_R: Any,
    out_RHD: Any,
) -> None:
    """Fill ``out_RHD``: row r attends to the first ``lengths_R[r]`` places of its slot.

    Arrays of float32, the queries scaled already, and of int64; S slots, H heads, K key heads.
    """
    num_rows, num_heads, head_dim = query_RHD.shape
    group = num_heads // keys_SKDL.shape[1]
    weights = np.empty(keys_SKDL.shape[3], dtype=np.float32)
    attended = np.empty(head_dim, dtype=np.float32)
    for row in range(num_rows):
        slot, length = slots_R[row], lengths_R[row]
        for head in range(num_heads):
            keys_DL = keys_SKDL[slot, head // group]
            values_LD = values_SKLD[slot, head // group]
            weights[:length] = 0.0
            # Along the keys, not along the dimension: sums that need no reordering to be vectors.
            for dim in range(head_dim):
                factor = query_RHD[row, head, dim]
                for place in range(length):
                    weights[place] += factor * keys_DL[dim, place]
            largest = weights[0]
            for place in range(1, length):
                largest = max(largest, weights[place])
            total = np.float32(0.0)
            for place in range(length):
                weights[place] = math.exp(weights[place] - largest)
                total += weights[place]
            attended[:] = 0.0
            for place in range(length):
                weight = weights[place] / total
                for dim in range(head_dim):
                    attended[dim] += weight * values_LD[place, dim]
            out_RHD[row, head] = attended

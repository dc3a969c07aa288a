"""From logits to tokens: noise that is a function of (seed, episode, position), and the choice.

Nothing here has state. Two runs, two batch shapes or two slots give the same token for the same
logits, because the noise is computed and not drawn.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from forage.types import Alternatives

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def noise_key(seed: int, episode_key: str) -> int:
    """A 64-bit key for one episode's noise."""
    digest = blake2b(f"{seed}/{episode_key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform_noise(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), one a row: SplitMix64 of the key and the token's position.

    ``keys_B`` and ``positions_B`` are uint64; float64 out.
    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    with np.errstate(over="ignore"):
        state = keys_B + (positions_B + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX1
        state = (state ^ (state >> np.uint64(27))) * _MIX2
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose_tokens(
    logits_BV: Tensor, noise_B: Tensor, temperature_B: Tensor, top_p_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities under the distribution they were sampled from.

    ``noise_B`` float64 in [0, 1); temperature 0 takes the most likely token, whose log-probability
    is then given at temperature 1. ``top_p`` keeps the fewest tokens whose mass reaches it, and the
    log-probability is renormalised over them. Returns int64 [B] and float32 [B].
    """
    is_greedy_B = temperature_B == 0
    logprobs_BV = _distribution(logits_BV, temperature_B, top_p_B)
    cumulative_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    target_B1 = (noise_B * cumulative_BV[:, -1])[:, None]
    sampled_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
    sampled_B = sampled_B.clamp(max=logits_BV.shape[-1] - 1)
    tokens_B = torch.where(is_greedy_B, logits_BV.argmax(dim=-1), sampled_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def likeliest_tokens(
    logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, num_tokens: int
) -> list[Alternatives]:
    """The likeliest tokens of each row under what ``choose_tokens`` samples from.

    Log-probabilities are rounded to 4 places: they are for the eye, and records stay small. What
    ``top_p`` cuts off is left out.
    """
    logprobs_BV = _distribution(logits_BV, temperature_B, top_p_B)
    found_BK = logprobs_BV.topk(min(num_tokens, logprobs_BV.shape[-1]), dim=-1)
    rows = zip(found_BK.indices.tolist(), found_BK.values.tolist(), strict=True)
    return [
        tuple((t, round(p, 4)) for t, p in zip(*row, strict=True) if p > -math.inf) for row in rows
    ]


def _distribution(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Log-probabilities at the temperature (1 where it is 0), cut to the nucleus."""
    scale_B = torch.where(temperature_B == 0, torch.ones_like(temperature_B), temperature_B)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    if bool((top_p_B < 1).any()):
        logprobs_BV = _nucleus(logprobs_BV, top_p_B)
    return logprobs_BV


def _nucleus(logprobs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    ordered_BV, index_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    mass_before_BV = ordered_BV.exp().cumsum(dim=-1) - ordered_BV.exp()
    ordered_BV = ordered_BV.masked_fill(mass_before_BV >= top_p_B[:, None], float("-inf"))
    kept_BV = torch.empty_like(ordered_BV).scatter_(1, index_BV, ordered_BV)
    # A row that keeps everything keeps its bits, also beside rows that do not.
    is_cut_B1 = top_p_B[:, None] < 1
    return torch.where(is_cut_B1, torch.log_softmax(kept_BV, dim=-1), logprobs_BV)

"""Chooses the number format of an encoder on a CPU: bfloat16 where it is faster and close enough.

Processors with AVX512-BF16 or AMX multiply bfloat16 two to four times as fast as float32, others
much slower, so it is measured; whether the vectors stay close is measured too. The caller gives
the encoding; loading and converting models is not done here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

logger = logging.getLogger(__name__)

MIN_COSINE = 0.999
MIN_SPEEDUP = 1.15

_SENTENCES = (
    "The first bridge over the river was built of stone and stood for four hundred years.",
    "Its author, born in 1815, published nothing else.",
    "who designed the analytical engine",
    "Between the two lakes lies a town known for its clocks; its station opened in 1859, "
    "and trains still leave on time.",
)
PROBE_TEXTS = tuple(
    " ".join(_SENTENCES[(start + step) % len(_SENTENCES)] for step in range(1 + start % 6))
    for start in range(24)
)


def is_bfloat16_better(
    encode: Callable[[Sequence[str]], np.ndarray], switch_to_bfloat16: Callable[[], None]
) -> bool:
    """Time and compare ``encode`` (float32 [B, D]) before and after the switch."""
    exact, exact_s = _measure(encode)
    switch_to_bfloat16()
    rounded, rounded_s = _measure(encode)
    cosine, speedup = closeness(exact, rounded), exact_s / rounded_s
    is_better = cosine >= MIN_COSINE and speedup >= MIN_SPEEDUP
    logger.info(
        "encoder in %s: bfloat16 is %.2f times as fast as float32 here, lowest cosine %.5f",
        "bfloat16" if is_better else "float32",
        speedup,
        cosine,
    )
    return is_better


def closeness(left_BD: np.ndarray, right_BD: np.ndarray) -> float:
    """The lowest cosine between the vectors of a row, less any difference in length."""
    products = (left_BD * right_BD).sum(axis=1)
    squares = [(vectors * vectors).sum(axis=1) for vectors in (left_BD, right_BD)]
    # The larger square, not the product of the lengths: a vector of half the length gives a half.
    return float((products / np.maximum(np.maximum(*squares), 1e-12)).min())


def _measure(encode: Callable[[Sequence[str]], np.ndarray]) -> tuple[np.ndarray, float]:
    vectors = encode(PROBE_TEXTS)  # a warm-up: the first call allocates
    times: list[float] = []
    for _ in range(2):
        started = time.perf_counter()
        encode(PROBE_TEXTS)
        times.append(time.perf_counter() - started)
    return vectors, min(times)

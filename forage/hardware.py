"""How this machine computes: threads and matrix kernels, chosen by short measurements.

Called once, before the first model runs. It changes speed, never results: a kernel is only chosen
after it has been seen to be as exact as float32 is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

LOG = logging.getLogger(__name__)

_ROWS, _INNER, _COLUMNS = 2048, 128, 384
_ROUNDS = 5


def quiet_openmp() -> None:
    """Let idle OpenMP threads sleep; must be called before torch is imported.

    By default they spin, which makes small models many times slower where virtual cores are shared.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def choose_matmul_kernel() -> str:
    """Use oneDNN for float32 products where it is as exact as float32 and faster; says which.

    Torch's default kernels reach a fraction of some processors' speed. oneDNN's are switched on by
    allowing bfloat16 arithmetic, which they use only on processors made for it: the products are
    compared with float64, and where precision was lost the default stays.
    """
    import torch

    flags = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(_ROWS, _INNER, generator=generator)
    right = torch.randn(_INNER, _COLUMNS, generator=generator)
    exact = left.double() @ right.double()

    def product() -> torch.Tensor:
        return left @ right

    flags.fp32_precision = "ieee"
    default_error = (product() - exact).abs().max().item()
    default_s = _fastest(product)
    flags.fp32_precision = "bf16"
    error = (product() - exact).abs().max().item()
    if error <= 2 * default_error and _fastest(product) < default_s:
        return "oneDNN"
    flags.fp32_precision = "ieee"
    return "default"


def choose_num_threads(work: Callable[[], object], candidates: tuple[int, ...]) -> int:
    """The number of torch threads of ``candidates`` with which ``work`` was fastest."""
    import torch

    seconds: dict[int, float] = {}
    for num_threads in candidates:
        torch.set_num_threads(num_threads)
        seconds[num_threads] = _fastest(work)
    best = min(seconds, key=lambda num_threads: seconds[num_threads])
    torch.set_num_threads(best)
    LOG.debug("seconds by number of threads: %s; using %d", seconds, best)
    return best


def _fastest(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)

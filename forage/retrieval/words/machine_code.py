"""Loops over numpy arrays as machine code: the only file that imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T], **options: Any) -> Callable[P, T]:
    """Compiled at its first call, without the interpreter's lock, and kept for later processes.

    Where no folder can be written it is compiled in each process anew. ``options`` are numba's.
    """
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        return njit(nogil=True, **options)(function)

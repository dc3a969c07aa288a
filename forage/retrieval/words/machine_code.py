"""Compiles loops over numpy arrays to machine code: the only file that imports the compiler.

numba is an extra (``fast``, and part of ``train``): building and searching an index of words work
without it, more slowly; the torch engine needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

try:
    from numba import njit
except ModuleNotFoundError:
    njit = None

P = ParamSpec("P")
T = TypeVar("T")

HAS_COMPILER = njit is not None


def compiled(function: Callable[P, T], **options: Any) -> Callable[P, T]:
    """Compiled at its first call, without the interpreter's lock, and kept for later processes.

    If no folder can be written, each process compiles it again. ``options`` are numba's. Without
    numba a call raises ``ModuleNotFoundError``.
    """
    if njit is None:
        return _needs_numba(function)
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        return njit(nogil=True, **options)(function)


def _needs_numba(function: Callable[P, T]) -> Callable[P, T]:
    @wraps(function)
    def refuse(*args: P.args, **kwargs: P.kwargs) -> T:
        raise ModuleNotFoundError(f"{function.__name__} needs numba", name="numba")

    return refuse

"""Compiles loops over numpy arrays to machine code: the only file that imports numba.

numba is an extra (``fast``, and part of ``train``). Without it, word indexes are built and searched
more slowly, and the torch engine does not work.
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
    """Compiles a function at its first call and caches the code on disk; releases the GIL.

    If no cache folder is writable, each process compiles again. ``options`` are numba's. Without
    numba, a call raises ``ModuleNotFoundError``.
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

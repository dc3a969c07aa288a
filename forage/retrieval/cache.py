"""A least-recently-used cache of a fixed size, shared by the server's batcher and the client."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Keeps what was used last, up to a total weight of ``size`` (0: keeps nothing)."""

    def __init__(self, size: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        """``weigh``: what a value counts, 1 or more; without it, ``size`` is a number of values."""
        self._size = size
        self._weigh = weigh
        self._weight = 0
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of ``key``, now the most recently used, or None."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Remember ``value``; those used least recently make room."""
        old = self._entries.pop(key, None)
        if old is not None:
            self._weight -= self._weigh(old)
        weight = self._weigh(value)
        if weight > self._size:
            return
        self._entries[key] = value
        self._weight += weight
        while self._weight > self._size:
            self._weight -= self._weigh(self._entries.popitem(last=False)[1])

"""Whose query is searched next, and how many of them at once.

Addresses take turns, and so do the requests of an address: one query each. A request of a thousand
queries therefore delays the single query of another client by one batch, not by a thousand
searches. Batches are as large as the measured speed allows within ``_BATCH_S``, up to a weight that
no speed raises; the speed also tells when a request that arrives now would be answered. Searching
is ``forage.retrieval.serve.batcher``'s.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forage.retrieval.serve.limits import OverLimit
from forage.types import Hit

# What a search is to take at most, so that whoever comes next waits no longer.
_BATCH_S = 0.5
# Smaller batches would waste what encoders and indexes gain by searching many queries at once.
_LEAST_WEIGHT = 32.0
# However fast the last batches were: the next queries may cost a thousand times as much at the same
# weight, and whoever comes next waits for all of them.
_MOST_WEIGHT = 64.0
# How soon earlier batches stop counting.
_KEPT = 0.9


def weight_of(num_queries: int, num_chars: int, topk: int) -> float:
    """Roughly how many ordinary queries these cost: long ones and many hits take longer."""
    return num_queries * (1 + topk / 128) + num_chars / 256


@dataclass(frozen=True, slots=True)
class Answered:
    """The hits of a query, about how many bytes they are in a reply, and how many in memory."""

    hits: list[Hit]
    num_bytes: int
    memory: int = 0


class Asked:
    """One request: its queries, the hits found so far, and the next query that needs a turn."""

    def __init__(self, queries: Sequence[str], topk: int, max_bytes: float = math.inf) -> None:
        self.queries, self.topk = queries, topk
        self.weight = weight_of(len(queries), sum(map(len, queries)), topk)
        self.hits: list[list[Hit]] = [[]] * len(queries)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.place = 0
        self._num_missing = len(queries)
        self._num_bytes, self._max_bytes = 0, max_bytes

    @property
    def is_over(self) -> bool:
        """It needs no more turns: all its queries had theirs, it has failed, or its caller left."""
        return self.place == len(self.queries) or self.done.done()

    @property
    def weight_left(self) -> float:
        """Of its weight, what has had no turn yet."""
        return 0.0 if self.is_over else self.weight * (1 - self.place / len(self.queries))

    def answer(self, place: int, found: Answered) -> None:
        """The hits of one query; a reply that becomes too large is given up."""
        self.hits[place] = found.hits
        self._num_bytes += found.num_bytes
        self._num_missing -= 1
        if self._num_bytes > self._max_bytes:
            num_answered = len(self.queries) - self._num_missing
            detail = f"the passages of {num_answered} of {len(self.queries)} queries (topk "
            detail += f"{self.topk}) have more than {self._max_bytes} bytes, which a reply may have"
            self.fail(OverLimit(413, f"{detail}; ask fewer queries at once, or a smaller topk"))
        elif not self._num_missing and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """One of its queries could not be searched, so none of the others is."""
        if not self.done.done():
            self.done.set_exception(error)


class Turns:
    """Requests in line, by address and ``topk``: one search has one ``topk``."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[int, deque[Asked]]] = OrderedDict()
        # At least what all requests in line still weigh: what they weighed when they came.
        self._weight = 0.0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, asked: Asked, address: str) -> None:
        """Stand in line behind the other requests of this address."""
        line = self._lines.setdefault(address, OrderedDict())
        line.setdefault(asked.topk, deque()).append(asked)
        self._weight += asked.weight

    def weight_before(self, asked: Asked, address: str, enough: float) -> float:
        """What is searched until a new request is through, the request included.

        Of each request of its address as much as of itself, of each other address as much as of
        its own. Where even all of all is below ``enough``, that is the answer.
        """
        if self._weight + asked.weight <= enough:
            return self._weight + asked.weight
        left = self._weights_left()
        own = asked.weight + sum(min(asked.weight, w) for w in left.pop(address, ()))
        return own + sum(min(own, sum(weights)) for weights in left.values())

    @property
    def weight(self) -> float:
        """What is still to be searched for all requests in line."""
        return sum(sum(weights) for weights in self._weights_left().values())

    @property
    def weight_before_one_leaves(self) -> float:
        """What is searched until the first of them is through."""
        left = self._weights_left()
        least = min((min(weights) for weights in left.values()), default=0.0)
        return sum(min(least, w) for weights in left.values() for w in weights)

    def of_one_topk(self) -> Iterator[Asked]:
        """Requests in their turns, each as often as it has queries; stop when a search is full.

        The address that has waited longest begins, and decides the ``topk``.
        """
        first = next(iter(self._lines))
        self._lines.move_to_end(first)
        topk = next(iter(self._lines[first]))
        self._lines[first].move_to_end(topk)
        others = (name for name, line in self._lines.items() if name != first and topk in line)
        addresses = deque([first, *others])
        while addresses:
            address = addresses.popleft()
            asked = self._next(address, topk)
            if asked is not None:
                addresses.append(address)
                yield asked

    def _weights_left(self) -> dict[str, list[float]]:
        """Of each request in line, by address."""
        return {
            address: [asked.weight_left for requests in line.values() for asked in requests]
            for address, line in self._lines.items()
        }

    def _next(self, address: str, topk: int) -> Asked | None:
        """The first in line, who goes to its end; None where nobody is left."""
        line = self._lines[address]
        requests = line[topk]
        while requests:
            asked = requests.popleft()
            if not asked.is_over:
                requests.append(asked)
                return asked
            self._weight -= asked.weight
        del line[topk]
        if not line:
            del self._lines[address]
        return None


class Speed:
    """How fast this source searches when there is much to do, measured from its last batches."""

    def __init__(self) -> None:
        self._weight = self._seconds = 0.0

    def add(self, weight: float, seconds: float) -> None:
        """A batch that was searched; a small one says nothing about large ones."""
        if weight >= _LEAST_WEIGHT / 2:
            self._weight = _KEPT * self._weight + weight
            self._seconds = _KEPT * self._seconds + seconds

    def seconds(self, weight: float) -> float:
        """How long this much takes to search; 0 as long as nobody knows."""
        return weight * self._seconds / self._weight if self._seconds else 0.0

    def weight(self, seconds: float) -> float:
        """How much is searched in this time; without end as long as nobody knows."""
        return seconds * self._weight / self._seconds if self._seconds else math.inf

    @property
    def batch_weight(self) -> float:
        """What a batch may weigh; the query that reaches it is the batch's last."""
        if not self._seconds:
            return _LEAST_WEIGHT
        return min(max(_LEAST_WEIGHT, self.weight(_BATCH_S)), _MOST_WEIGHT)

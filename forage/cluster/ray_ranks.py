"""Ranks of a trainer as actors of Ray, on one machine or on several.

As with the rank processes of one machine, every call goes to all of them, rank 0 answers, and a
rank that fails or dies ends all. Ranks are numbered machine by machine, so that neighbours, which
matrices are cut over, share one.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from forage.cluster.ray_actors import Actor, ActorLostError, OnRay, Reply, Spot, first_ready, shared
from forage.training.ranks.rank_processes import (
    RankDiedError,
    RankPlace,
    answer_of,
    join_group,
    open_store,
)

_GRACE_S = 30.0


class RankActor(OnRay):
    """One rank: joins the group, makes its object, and calls it."""

    _made: object = None

    def begin(self, place: RankPlace, make: bytes) -> bytes:
        def work() -> None:
            join_group(place)
            self._made = pickle.loads(make)()

        return answer_of(work)

    def call(self, message: bytes) -> bytes:
        method, arguments = pickle.loads(message)
        return answer_of(getattr(self._made, method), *arguments)


class RayRanks:
    """A ``RankGroup`` of actors; close it."""

    def __init__(
        self,
        actors: Sequence[Actor],
        address: str,
        make: Callable[[], object],
        device_type: str,
        timeout_s: float,
    ) -> None:
        """Each actor calls ``make``; the store in which they meet is here, at ``address``."""
        spots = [actor.spot() for actor in actors]
        by_machine = sorted(range(len(actors)), key=lambda i: (spots[i].machine, spots[i].gpus))
        self._actors = [actors[index] for index in by_machine]
        self.spots: list[Spot] = [spots[index] for index in by_machine]
        self.bundles = by_machine
        """Where rank 0, 1, ... stands among the places that actors were made for."""
        self._store = open_store(address)
        beside = Counter(spot.machine for spot in spots)
        made = shared(pickle.dumps(make))
        replies: list[Reply] = []
        for rank, (actor, spot) in enumerate(zip(self._actors, self.spots, strict=True)):
            place = RankPlace(
                rank=rank,
                num_ranks=len(actors),
                num_beside=beside[spot.machine],
                host=address,
                port=self._store.port,
                device_type=device_type,
                device_index=0,  # Ray shows an actor no GPU but its own
                timeout_s=timeout_s,
            )
            replies.append(actor.ask("begin", place, made))
        self._answer(replies)

    def call(self, method: str, *arguments: object) -> Any:
        """See ``RankGroup``."""
        if not self._actors:
            raise RankDiedError("the ranks have ended")
        message = shared(pickle.dumps((method, arguments), protocol=pickle.HIGHEST_PROTOCOL))
        return self._answer([actor.ask("call", message) for actor in self._actors])

    def close(self) -> None:
        """End the actors, also those that wait for one that is gone."""
        for actor in self._actors:
            actor.kill()
        self._actors = []

    def _answer(self, replies: list[Reply]) -> Any:
        """Wait for every rank, which waits for no other longer than its own time allows."""
        waiting, first = list(replies), None
        while waiting:
            for reply in first_ready(waiting, None):
                waiting.remove(reply)
                rank = replies.index(reply)
                try:
                    is_right, answer = pickle.loads(reply.take())
                except ActorLostError as error:
                    self.close()
                    raise RankDiedError(f"rank {rank} has died") from error
                if not is_right:
                    if isinstance(answer, RankDiedError):  # who died says so soon
                        answer = _who_died(replies, waiting) or answer
                    self.close()
                    raise answer
                if rank == 0:
                    first = answer
        return first


def _who_died(replies: list[Reply], waiting: list[Reply]) -> RankDiedError | None:
    """The rank that the others waited for in vain, as soon as Ray knows."""
    left = list(waiting)
    while left and (ready := first_ready(left, _GRACE_S)):
        left.remove(ready[0])
        try:
            ready[0].take()
        except ActorLostError:
            return RankDiedError(f"rank {replies.index(ready[0])} has died")
    return None

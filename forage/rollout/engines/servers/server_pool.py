"""Which server samples which episode: an episode stays at one, where its prefix is cached.

A server serves turns from the moment it has the run's weights until it fails; then its episodes go
on elsewhere. Giving it the weights again is ``publish.py``'s, starting it again ``cluster/``'s.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forage.errors import UserError
from forage.rollout.engines.servers.engine_server import EngineServer

LOG = logging.getLogger(__name__)

GO_ON = "go on: training with --resume, an evaluation with the same command and --retry-failed"
"""What to do about an error that ends either of them."""


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool. ``lost`` is done when it has failed, and new when it serves again."""

    server: EngineServer
    is_serving: bool = False
    why: str = "it has not had the weights"
    """Why it does not serve."""
    num_episodes: int = 0
    lost: asyncio.Future[None] = field(default_factory=asyncio.Future)


@dataclass(frozen=True, slots=True)
class Seat:
    """An episode's place: its server, and the salt of the keys and values that it may read."""

    member: Member
    salt: str


class ServerPool:
    """The servers of a run; use it on one event loop."""

    def __init__(
        self,
        servers: Sequence[EngineServer],
        lost_after_s: float,
        on_failed: Callable[[str], None] = lambda url: None,
    ) -> None:
        """``on_failed`` is told the address of a server that failed, so that it is started again.

        ``lost_after_s``: how long a turn waits while no server serves, and longer while weights
        change: until they are out, no server can have them.
        """
        self.members = [Member(server) for server in servers]
        self.num_updates = 0
        """Updates of the weights that have begun; an episode's salt is the number at its own."""
        self.settled = asyncio.Event()
        """Cleared while servers get weights and are checked. Some sample by the older ones until
        they are paused, and their keys must not be read by an episode that begins after that."""
        self.settled.set()
        self.weights_lock = asyncio.Lock()
        """Held while weights change and while they travel."""
        self.versions: tuple[int, int] | None = None
        """Of the weights that servers may sample with, two in an update; None before the first."""
        self._lost_after_s = lost_after_s
        self._on_failed = on_failed
        self._seats: dict[str, Seat] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._end: Exception | None = None

    @property
    def is_updating(self) -> bool:
        """Whether servers get weights now, or are checked."""
        return not self.settled.is_set()

    @property
    def serving(self) -> list[Member]:
        """The servers that have the run's weights."""
        return [member for member in self.members if member.is_serving]

    @property
    def waiting(self) -> list[Member]:
        """The servers that have not, or no longer."""
        return [member for member in self.members if not member.is_serving]

    async def seat(self, episode_key: str) -> Seat:
        """The episode's server: its own while that serves, else the one with the fewest episodes.

        Raises ``UserError`` where none has served for too long, and what the pool gave up for.
        """
        seat = self._seats.get(episode_key)
        if seat is not None and seat.member.is_serving:
            return seat
        await self._wait_until_one_serves()
        member = min(self.serving, key=lambda each: each.num_episodes)
        salt = seat.salt if seat is not None else self._new_salt()
        self.release(episode_key)
        member.num_episodes += 1
        self._seats[episode_key] = Seat(member, salt)
        return self._seats[episode_key]

    def _new_salt(self) -> str:
        """One for all episodes between two updates, and for each alone that begins in one.

        Digits and a point: vLLM refuses a turn whose salt is long, or has a slash in it.
        """
        own = f".{next(self._numbers)}" if self.is_updating else ""
        return f"{self.num_updates}{own}"

    def release(self, episode_key: str) -> None:
        """The episode is over, or leaves its server."""
        seat = self._seats.pop(episode_key, None)
        if seat is not None:
            seat.member.num_episodes -= 1

    def admit(self, member: Member) -> None:
        """The server has the run's weights: turns may go there."""
        if not member.is_serving:
            member.is_serving = True
            if member.lost.done():  # else its weights came through a group that is still good
                member.lost = asyncio.Future()
            self._changed.set()

    def leave_out(self, member: Member, why: str) -> None:
        """The server has failed: no turn goes there until it is admitted again."""
        LOG.warning("the server %s is left out: %s", member.server.url, why)
        member.is_serving, member.why = False, why
        if not member.lost.done():
            member.lost.set_result(None)
        self._on_failed(member.server.url)

    def give_up(self, why: Exception) -> None:
        """No server will be given weights any more: turns that wait for one raise ``why``."""
        self._end = why
        self._changed.set()

    async def _wait_until_one_serves(self) -> None:
        while not self.serving:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._lost_after_s)
            except TimeoutError:
                if not (self.serving or self.weights_lock.locked()):
                    raise UserError(self._none_serves()) from None

    def _none_serves(self) -> str:
        names = "; ".join(f"{member.server.url}: {member.why}" for member in self.members)
        return (
            f"no server samples any more: none has worked for {self._lost_after_s:g} s "
            f"(placement.engine.lost_after_s). {names}. Look into their logs, start them again "
            f"where they have ended, and {GO_ON}"
        )

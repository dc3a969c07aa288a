"""New weights for the servers of a pool: to all at once, checked, each step within a deadline.

The servers pause, take the weights, and go on, each of them in any case. A server serves turns only
where it says itself that it has the version. One that fails on the way is left out, and the update
is begun again with the others; one that comes back, or comes late, is given the weights between two
updates. Weights travel through a group of processes (vLLM with Forage's receiver) or through files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from forage.errors import PartLostError, UserError
from forage.rollout.engines.engine_server import EngineServer, Part, ServerFailed
from forage.rollout.engines.server_pool import Member, ServerPool

LOG = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_MAX_ATTEMPTS = 3


class Transport(Protocol):
    """One way of weights to servers; raises ``UpdateFailed``, and ``UserError`` for a misfit."""

    async def bring(self, members: Sequence[Member], version: str) -> None: ...


class UpdateFailed(Exception):
    """An update did not reach these servers; the others may be half new as well.

    ``why`` is said where none of them is to blame alone.
    """

    def __init__(self, failures: dict[Member, str], why: str = "") -> None:
        super().__init__(why or "; ".join(failures.values()))
        self.failures = failures


class ServerUpdates:
    """Brings weights to the servers of a pool; ``updating`` is what ``publish.py`` uses."""

    def __init__(
        self, pool: ServerPool, transport: Transport, recomputes: bool, sleeps: bool = False
    ) -> None:
        """``recomputes``: turns in flight go on over keys and values of the new weights.

        ``sleeps``: servers give their memory back while weights change.
        """
        self._pool = pool
        self._transport = transport
        self._recomputes = recomputes
        self._sleeps = sleeps
        self._asleep: dict[tuple[Member, Part], asyncio.Future[None]] = {}
        """Parts without memory, and what tells that their server is gone."""
        self._version: int | None = None
        self._lock = asyncio.Lock()
        """Held while weights change and while they travel."""

    @asynccontextmanager
    async def updating(self, version: Callable[[], int]) -> AsyncIterator[None]:
        """A context in which the weights may change; at its end the servers get them.

        Raises ``UserError`` where they are not those of the served model.
        """
        async with self._lock:
            if self._sleeps:
                await self._put_to_sleep()
            yield
            before, self._version = self._version, version()
            self._pool.versions = None if before is None else (before, self._version)
            self._pool.num_updates += 1
            members = await self._alive(self._pool.members)
            for member in self._pool.serving:
                if member not in members:
                    self._pool.leave_out(member, "it does not answer")
            await self._update(members, self._recomputes or self._pool.num_updates == 1)
            self._pool.versions = (self._version, self._version)

    @asynccontextmanager
    async def looking_after(self) -> AsyncIterator[None]:
        """Meanwhile, servers that came back or came late are given the weights, too."""
        watcher = asyncio.create_task(self._look_after())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            if self._version is None or not await self._alive(self._pool.waiting):
                continue
            async with self._lock:
                late = await self._alive(self._pool.waiting)  # an update may have come between
                try:
                    await self._update(late, is_recomputed=True)
                except PartLostError as lost:  # whoever has the weights is gone
                    self._pool.give_up(lost)
                    return
                except Exception as error:  # an end of this task would be noticed by nobody
                    is_bug = not isinstance(error, UserError)
                    LOG.error("a server that came late stays out: %s", error, exc_info=is_bug)

    async def _put_to_sleep(self) -> None:
        members = self._pool.serving
        parts: tuple[Part, ...] = ("weights", "kv_cache")
        self._asleep = {(member, part): member.lost for member in members for part in parts}
        try:
            await each(members, lambda server: server.sleep())
        except UpdateFailed as failed:
            for member, why in failed.failures.items():
                self._pool.leave_out(member, why)

    async def _wake(self, members: Sequence[Member], part: Part) -> None:
        """Wake a part, once, of those that sleep: not of one that was lost, and is back awake."""
        asleep = [m for m in members if self._asleep.pop((m, part), None) is m.lost]
        await each(asleep, lambda server: server.wake(part))

    async def _alive(self, members: Sequence[Member]) -> list[Member]:
        alive = await asyncio.gather(*(member.server.is_alive() for member in members))
        return [member for member, is_alive in zip(members, alive, strict=True) if is_alive]

    async def _update(self, members: Sequence[Member], is_recomputed: bool) -> None:
        """Pause, bring, go on; servers that fail are left out, and the others begun again."""
        paused: dict[Member, None] = {}
        why = ""
        try:
            for _ in range(_MAX_ATTEMPTS):
                if not members:
                    return
                try:
                    paused |= dict.fromkeys(members)
                    await each(members, lambda server: server.pause())
                    await self._wake(members, "weights")
                    await self._transport.bring(members, str(self._version))
                    await self._wake(members, "kv_cache")
                    if is_recomputed:
                        await each(members, lambda server: server.forget_keys())
                    await each(members, self._check_version)
                    break
                except UpdateFailed as failed:
                    why = str(failed)
                    for member, reason in failed.failures.items():
                        self._pool.leave_out(member, reason)
                    members = [m for m in members if m not in failed.failures]
            else:
                for member in members:
                    told = f"{_MAX_ATTEMPTS} updates failed, the last because {why}"
                    self._pool.leave_out(member, told)
                members = []
        finally:
            await asyncio.gather(*map(_resume, paused))
        for member in members:
            self._pool.admit(member)

    async def _check_version(self, server: EngineServer) -> None:
        if (found := await server.version()) != str(self._version):
            raise ServerFailed.for_good(
                server.url, f"take version {self._version}", f"it says that it has {found}"
            )


async def _resume(member: Member) -> None:
    """Let a server go on, whatever became of the update; one that is gone is no error here."""
    try:
        await member.server.resume()
    except ServerFailed as failed:
        LOG.warning("%s", failed)


async def each(members: Sequence[Member], ask: Callable[[EngineServer], Awaitable[None]]) -> None:
    """Ask all servers at once; raises ``UpdateFailed`` with those that failed."""
    outcomes = await asyncio.gather(*(ask(m.server) for m in members), return_exceptions=True)
    failures: dict[Member, str] = {}
    for member, outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, ServerFailed):
            failures[member] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    if failures:
        raise UpdateFailed(failures)

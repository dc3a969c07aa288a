"""New weights for the servers of a pool: to all at once, checked, each step within a deadline.

The servers pause, take the weights, and go on, each of them in any case but one whose memory sleeps
still. A server serves turns only if it says that it has the version and computes with it what the
trainer computes (``weight_check.py``). One that fails on the way is left out, and the update is
begun again with the others; one that comes back, or comes late, is given the weights between two
updates. Weights travel through a group of processes (vLLM with Forage's receiver) or through files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from forage.errors import PartLostError, UserError
from forage.rollout.engines.servers.engine_server import EngineServer, Part, ServerFailed
from forage.rollout.engines.servers.server_pool import GO_ON, Member, ServerPool
from forage.rollout.engines.servers.weight_check import WeightCheck

LOG = logging.getLogger(__name__)

_LOOK_AGAIN_S, _LONGEST_PAUSE_S = 1.0, 300.0
"""Between two looks at servers that serve no turns, and before one that failed is asked again."""
_PAUSE_RATIO = 10
"""A server that fails by hanging takes a tenth of the run's time at most."""
_MAX_ATTEMPTS, _MAX_RESUMES = 3, 2


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


@dataclass(frozen=True, slots=True)
class _Pause:
    """How long a server that failed is left alone."""

    length_s: float
    ends_at: float

    @classmethod
    def after(cls, before: _Pause | None, took_s: float) -> _Pause:
        """Twice as long as the one before, and long beside what the last update took."""
        doubled = min(2 * before.length_s, _LONGEST_PAUSE_S) if before else _LOOK_AGAIN_S
        length_s = max(doubled, _PAUSE_RATIO * took_s)
        return cls(length_s, monotonic() + length_s)

    @property
    def is_over(self) -> bool:
        return self.ends_at <= monotonic()


class ServerUpdates:
    """Brings weights to the servers of a pool; ``updating`` is what ``publish.py`` uses."""

    def __init__(
        self,
        pool: ServerPool,
        transport: Transport,
        recomputes: bool,
        sleeps: bool = False,
        check: WeightCheck | None = None,
    ) -> None:
        """``recomputes``: turns in flight go on over keys and values of the new weights.

        ``sleeps``: servers give their memory back while weights change. ``check`` compares each
        server with the trainer after an update; None: the servers are trusted.
        """
        self._pool = pool
        self._transport = transport
        self._recomputes = recomputes
        self._sleeps = sleeps
        self._check = check
        self._asleep: set[tuple[Member, Part]] = set()
        """Parts that were put to sleep and not woken since."""
        self._version: int | None = None
        self._brought: set[str] = set()
        """All versions so far; a server that was started again has none of them."""

    @asynccontextmanager
    async def updating(self, version: Callable[[], int]) -> AsyncIterator[None]:
        """A context in which the weights may change; at its end the servers get them.

        Raises ``UserError`` where they are not those of the served model, or no server computes
        with them what the trainer computes.
        """
        async with self._pool.weights_lock:
            if self._sleeps:
                await self._put_to_sleep()
            yield
            if self._check is not None:
                await self._check.prepare()
            before, self._version = self._version, version()
            self._brought.add(str(self._version))
            self._pool.versions = None if before is None else (before, self._version)
            self._pool.num_updates += 1
            self._pool.settled.clear()
            try:
                await self._update_all()
            finally:
                self._pool.settled.set()
            self._pool.versions = (self._version, self._version)

    async def _update_all(self) -> None:
        """Those that serve; where none does, as before the first update, whoever answers.

        The latter may hold keys and values of another run, under the same salts.
        """
        is_recomputed = self._recomputes or not self._pool.serving
        members = await self._alive(self._pool.serving or self._pool.members)
        for member in self._pool.serving:
            if member not in members:
                self._pool.leave_out(member, "it does not answer")
        await self._update(members, is_recomputed)
        if all_wrong := self._all_wrong():
            raise all_wrong

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
        """One that fails is left alone for a time: who learns waits for an update under way."""
        pauses: dict[Member, _Pause] = {}
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            if self._version is None:
                continue
            due = [m for m in self._pool.waiting if m not in pauses or pauses[m].is_over]
            if not await self._alive(due):
                continue
            async with self._pool.weights_lock:
                began_at = monotonic()
                # An update may have come between.
                late = await self._alive([member for member in due if not member.is_serving])
                try:
                    await self._update(late, is_recomputed=True)
                except PartLostError as lost:  # whoever has the weights is gone
                    self._pool.give_up(lost)
                    return
                except Exception as error:  # an end of this task would be noticed by nobody
                    is_bug = not isinstance(error, UserError)
                    LOG.error("a server that came late stays out: %s", error, exc_info=is_bug)
            if all_wrong := self._all_wrong():
                self._pool.give_up(all_wrong)
                return
            for member in late:
                before = pauses.pop(member, None)
                if not member.is_serving:
                    # Where none serves there is nobody to spare.
                    took_s = monotonic() - began_at if self._pool.serving else 0.0
                    pauses[member] = _Pause.after(before, took_s)

    async def _put_to_sleep(self) -> None:
        members = self._pool.serving
        parts: tuple[Part, ...] = ("weights", "kv_cache")
        self._asleep |= {(member, part) for member in members for part in parts}
        try:
            await each(members, lambda server: server.sleep())
        except UpdateFailed as failed:
            for member, why in failed.failures.items():
                self._pool.leave_out(member, why)

    async def _wake(self, members: Sequence[Member], part: Part) -> None:
        """Wake a part of those that sleep."""
        asleep = [member for member in members if (member, part) in self._asleep]

        async def wake(server: EngineServer) -> None:
            await server.wake(part)
            # Only now: one that fails in it sleeps still, and is woken in a later update.
            self._asleep -= {(m, part) for m in asleep if m.server is server}

        await each(asleep, wake)

    async def _forget_sleep_of_restarted(self, members: Sequence[Member]) -> None:
        """One that was lost may be another process now, and awake: to wake it would end SGLang's.

        It is asked before it gets a version.
        """
        for member in members:
            if not member.lost.done() or not self._sleeps_still(member):
                continue
            try:
                found = await member.server.version()
            except ServerFailed as failed:
                raise UpdateFailed({member: str(failed)}) from failed
            if found not in self._brought:
                self._asleep -= {(member, "weights"), (member, "kv_cache")}

    def _sleeps_still(self, member: Member) -> bool:
        return any(asleep is member for asleep, _ in self._asleep)

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
                    await self._forget_sleep_of_restarted(members)
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
            # One that failed before it was woken would sample without weights, or without keys.
            awake = [member for member in paused if not self._sleeps_still(member)]
            stuck = dict(zip(awake, await asyncio.gather(*map(_resume, awake)), strict=True))
        faults = await self._faults([member for member in members if stuck[member] is None])
        for member in members:
            if (why := stuck[member] or faults.get(member)) is None:
                self._pool.admit(member)
            else:
                self._pool.leave_out(member, why)

    async def _faults(self, members: Sequence[Member]) -> dict[Member, str]:
        """Why servers that have the weights must serve no turn."""
        try:
            if self._check is not None:
                await each(members, self._check)
        except UpdateFailed as failed:
            return failed.failures
        return {}

    def _all_wrong(self) -> UserError | None:
        """The error that ends the run once every server differs from the trainer."""
        members = self._pool.members
        if self._check is None or not self._check.wrong.issuperset(m.server for m in members):
            return None
        reasons = "; ".join(member.why for member in members)
        return UserError(
            f"no server samples with the trainer's weights: {reasons}. Sample in process "
            "(placement.engine: torch), or with another build or version of the server. If it "
            "computes in another type on purpose (quantized, say), raise "
            f"placement.engine.max_logprob_diff, and {GO_ON}"
        )

    async def _check_version(self, server: EngineServer) -> None:
        if (found := await server.version()) != str(self._version):
            raise ServerFailed.for_good(
                server.url, f"take version {self._version}", f"it says that it has {found}"
            )


async def _resume(member: Member) -> str | None:
    """Let a server go on, whatever became of the update; gives the reason where it stays paused."""
    why = None
    for _ in range(_MAX_RESUMES):
        try:
            await member.server.resume()
        except ServerFailed as failed:
            why = str(failed)
        else:
            return None
    LOG.warning("%s", why)
    return why


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

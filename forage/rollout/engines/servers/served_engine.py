"""The engine over servers of our own policy: vLLM or SGLang, one or several.

A turn goes to its episode's server. Where that fails the turn is sampled again, from its beginning,
at another one. A server that answers and samples nothing is left out after some failures in a row,
and where all are so the run ends. New weights reach the servers through ``publish.py``; a server
serves no turn before it has them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence

from forage.errors import UserError
from forage.rollout.engines.engine import EngineCounters
from forage.rollout.engines.servers.engine_server import ServerFailed, TurnAborted
from forage.rollout.engines.servers.server_pool import GO_ON, Member, Seat, ServerPool
from forage.types import Completion, ContextOverflow, EngineError, FailureKind, Sampling

LOG = logging.getLogger(__name__)

_MAX_TRIES = 3
_MAX_NONSENSE = 8
_MAX_IN_A_ROW, _MAX_ROUNDS = 8, 3
"""Failures after which a server is left out, and how often it comes back to fail again."""
_PAUSE_S = 0.5


class ServedEngine:
    """Samples turns at the servers of a pool; see the module for how."""

    counters = EngineCounters()  # nothing is counted here

    def __init__(
        self, pool: ServerPool, vocabulary: int | None = None, num_ids: int | None = None
    ) -> None:
        """``vocabulary``: the rows of the model; ``num_ids``: those up to the last token of them.

        None: they are not checked.
        """
        self.pool = pool
        self._vocabulary = vocabulary
        self._num_ids = math.inf if num_ids is None else num_ids
        self._told_of: int | None = None
        self._in_a_row: Counter[Member] = Counter()
        """Failures of each server since it last sampled a turn, the first of a turn left out."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one turn.

        Raises ``EngineError`` for a turn that a working server cannot sample, and ``UserError``
        where no server works any more, or those that do sample no turn.
        """
        num_tries = num_nonsense = num_aborts = 0
        while True:
            seat = await self.pool.seat(sampling.episode_key)
            try:
                return await self._sample(seat, token_ids, sampling)
            except _Lost:
                continue
            except TurnAborted as aborted:
                num_aborts += not self.pool.is_updating
                if num_aborts > 1:
                    self._count_failure(seat.member, aborted)
                # It sleeps or ends: to ask again at once would keep both busy.
                await asyncio.sleep(_PAUSE_S)
            except ServerFailed as failed:
                num_tries += 1
                num_nonsense += failed.failure.kind is FailureKind.MALFORMED
                if num_nonsense >= _MAX_NONSENSE:  # left out, given the weights, and asked again
                    raise UserError(_no_turn_comes(failed, num_nonsense)) from failed
                await self._judge(seat, failed, num_tries)
            except ContextOverflow:
                raise
            except EngineError as refused:
                self._count_failure(seat.member, refused)
                self._tell(refused)
                raise

    def release(self, episode_key: str) -> None:
        """The episode is over; the servers manage their caches themselves."""
        self.pool.release(episode_key)

    async def close(self) -> None:
        """End the sessions; the servers go on as they are."""
        await asyncio.gather(*(member.server.close() for member in self.pool.members))

    async def _sample(self, seat: Seat, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The turn; raises ``_Lost``, and ``ServerFailed`` also for one of another policy."""
        first = self.pool.versions
        turn = await self._unless_lost(seat, token_ids, sampling)
        why = _foreign(turn, self._vocabulary, (*(first or ()), *(self.pool.versions or ())))
        if why is not None:
            raise ServerFailed.for_good(seat.member.server.url, "sample a turn", why)
        if (highest := max(turn.token_ids_T)) >= self._num_ids:
            raise EngineError(
                f"{seat.member.server.url} sampled the id {highest}, a spare row of the model: the "
                f"tokenizer's ids end at {self._num_ids - 1}. Nobody can read or learn the turn"
            )
        self._in_a_row.pop(seat.member, None)
        return turn

    async def _unless_lost(
        self, seat: Seat, token_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        """The turn; raises ``_Lost`` as soon as its server is left out.

        A turn that ends during an update waits until its server's new weights have been checked.
        """
        member, lost = seat.member, seat.member.lost
        turn = asyncio.ensure_future(member.server.sample(token_ids, sampling, seat.salt))
        try:
            await asyncio.wait({turn, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                raise _Lost
            completion = turn.result()
        finally:
            if not turn.done():
                turn.cancel()
                await asyncio.wait({turn})
        if self.pool.is_updating:
            await self.pool.settled.wait()
            if lost.done():
                raise _Lost
        return completion

    async def _judge(self, seat: Seat, failed: ServerFailed, num_tries: int) -> None:
        """Leave the server out, or wait a little before the next try; raises ``EngineError``."""
        member, failure = seat.member, failed.failure
        if not failure.may_pass or not await member.server.is_alive():
            if not member.lost.done():
                self.pool.leave_out(member, str(failed))
            return
        if num_tries > 1:
            self._count_failure(member, failed)
        if member.lost.done():
            return
        if num_tries < _MAX_TRIES:
            await asyncio.sleep(_PAUSE_S * num_tries)
        elif failure.kind is FailureKind.MALFORMED:
            self.pool.leave_out(member, f"{failed}, {num_tries} times in a row")
        else:
            self._tell(failed)
            raise EngineError(str(failed)) from failed

    def _count_failure(self, member: Member, failed: EngineError) -> None:
        """Leave out a server that fails again and again; raises ``UserError`` where all do."""
        if member.lost.done():  # of those in flight then, many fail together
            return
        self._in_a_row[member] += 1
        number = self._in_a_row[member]
        if number % _MAX_IN_A_ROW == 0:
            self.pool.leave_out(member, f"{failed}, {number} times in a row")
        others = (self._in_a_row[other] for other in self.pool.serving)
        if min([number, *others]) >= _MAX_IN_A_ROW * _MAX_ROUNDS:
            raise UserError(_none_samples(failed, number)) from failed

    def _tell(self, failed: EngineError) -> None:
        """Say why an episode ends, of the first one after each update."""
        if self._told_of != self.pool.num_updates:
            self._told_of = self.pool.num_updates
            LOG.warning("an episode ends as engine_failed: %s", failed)


def _foreign(turn: Completion, vocabulary: int | None, versions: Sequence[int]) -> str | None:
    """Why the turn is not of the run's policy; ``versions`` were out while it was sampled."""
    high = math.inf if vocabulary is None else vocabulary
    for token_id in turn.token_ids_T:
        if not 0 <= token_id < high:
            return f"its token {token_id} is none of the model's vocabulary of {high}"
    for version in turn.versions_T if versions else ():
        if not min(versions) <= version <= max(versions):
            return f"its tokens are of version {version}, and the run's is {max(versions)}"
    return None


def _none_samples(failed: EngineError, number: int) -> str:
    return (
        f"the servers answer, and none samples a turn: {failed}, {number} times in a row. Look "
        f"into their logs, and {GO_ON}"
    )


def _no_turn_comes(failed: ServerFailed, number: int) -> str:
    return (
        f"{failed}; that was so {number} times for one turn. Is the server one that "
        f"placement.engine names, and in use by this run alone? Look into its log, and {GO_ON}"
    )


class _Lost(Exception):
    """The server was left out while it sampled the turn."""

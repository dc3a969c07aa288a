"""Trying again: how often, with which pauses, and until when.

One loop for everything that asks a server. What is asked, of which server, and what each try costs
is the caller's; what a failure is, ``request.py``'s.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from forage.remote.request import RemoteFailure

T = TypeVar("T")

_MAX_BILLED = 2
_JITTER = random.Random()  # its own: a run's seeded generators stay untouched


@dataclass(frozen=True, slots=True)
class Patience:
    """How patiently a server is asked: ``timeout_s`` is for one try.

    Without ``max_retries`` a deadline alone ends it. If ``is_paid``, the second reply that cannot
    be used is final: each of them is billed.
    """

    timeout_s: float
    max_retries: int | None
    first_pause_s: float
    longest_pause_s: float
    is_paid: bool = False

    def pause_s(self, tries: int) -> float:
        """The pause after ``tries`` + 1 tries: doubled each time.

        With jitter, so that many clients do not come back together.
        """
        pause_s = min(self.first_pause_s * 2**tries, self.longest_pause_s)
        return pause_s * _JITTER.uniform(0.5, 1.5)


async def retry(
    attempt: Callable[[int], Awaitable[T | RemoteFailure]],
    patience: Patience,
    deadline: float = math.inf,
    needs_pause: Callable[[], bool] = lambda: True,
) -> T | RemoteFailure:
    """What ``attempt(0)``, ``attempt(1)``, ... gives, or the last failure.

    Ends with a failure that will not pass, when the retries are used up, and where the next try
    would begin after ``deadline`` (the loop's time). A server's wish to be left alone is granted
    as long as one more try fits behind it: its word alone must not end a search that has time left.
    Without ``needs_pause()`` (there is another server) the next try follows at once.
    """
    loop = asyncio.get_running_loop()
    tries = num_billed = 0
    while True:
        outcome = await attempt(tries)
        if not isinstance(outcome, RemoteFailure) or not outcome.may_pass:
            return outcome
        num_billed += patience.is_paid and outcome.was_answered
        if num_billed == _MAX_BILLED:
            return replace(outcome, may_pass=False)
        if tries == patience.max_retries:
            return outcome
        pause_s = 0.0
        if needs_pause():
            room_s = deadline - patience.timeout_s - loop.time()
            pause_s = max(patience.pause_s(tries), min(outcome.retry_after_s, room_s))
        if loop.time() + pause_s >= deadline:
            return outcome
        await asyncio.sleep(pause_s)
        tries += 1

"""What the engine's worker keeps of an episode: the turn being sampled and the slot it lives in.

Plain state, changed by ``worker`` alone; the lock beside it keeps sampling and new weights apart.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from forage.rollout.engines.torch.slots import Stretch
from forage.types import Completion, FinishReason, Sampling


@dataclass(slots=True)
class PendingTurn:
    """A turn being sampled, and the future that waits for it."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    key: int
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.sampling.max_tokens - len(self.sampled)

    def resolve(self, reason: FinishReason) -> None:
        completion = Completion(
            tuple(self.sampled), tuple(self.logprobs), tuple(self.versions), reason
        )
        self.loop.call_soon_threadsafe(_resolve, self.future, completion)

    def reject(self, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(_reject, self.future, error)


@dataclass(slots=True)
class Slot:
    """An episode's place: the tokens it is made of and how many of them have keys and values."""

    index: int
    episode_key: str | None = None
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    turn: PendingTurn | None = None
    is_first_turn: bool = True

    @property
    def prompt(self) -> tuple[int, ...] | None:
        """The tokens that other episodes may begin with too, while nothing of them is computed."""
        is_prompt = self.turn is not None and self.is_first_turn and self.num_cached == 0
        return tuple(self.token_ids) if is_prompt else None

    def stretch(self, draft: Sequence[int] = ()) -> Stretch:
        """The tokens that have no keys and values yet, and those that may come after them."""
        token_ids = [*self.token_ids[self.num_cached :], *draft]
        return Stretch(self.index, self.num_cached, token_ids, len(draft))


class WeightsLock:
    """Keeps the engine from the weights while they change, and until the change has a version."""

    def __init__(self) -> None:
        self.reading = threading.Lock()
        self.is_version_due = False

    def __enter__(self) -> None:
        self.reading.acquire()

    def __exit__(self, *_: object) -> None:
        self.is_version_due = True
        self.reading.release()


def _resolve(future: asyncio.Future[Completion], completion: Completion) -> None:
    if not future.done():
        future.set_result(completion)


def _reject(future: asyncio.Future[Completion], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

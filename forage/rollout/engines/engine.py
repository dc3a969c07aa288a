"""What turns token ids into sampled token ids: the protocol that training and evaluation hold.

``generate`` and ``release`` are all that the environment sees of it (``forage.types.Generate``);
the rest moves weights and ends it. ``open_engine`` makes the one that the settings name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from forage.types import Completion, Generate, Sampling


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine has done since it started."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were what was sampled; see ``drafter.py``."""
    transcript_violations: int = 0
    """Turns whose tokens did not continue what the engine had seen of the episode."""

    def metrics(self) -> dict[str, float]:
        """The counters as they are logged, since the start; shares only of what was counted."""
        metrics = {"transcript/violations": float(self.transcript_violations)}
        if self.drafted_tokens:
            metrics["rollout/drafts_accepted"] = self.accepted_tokens / self.drafted_tokens
        return metrics


class Engine(Generate, Protocol):
    """A sampler of turns; weights come to it through ``publish.py``."""

    @property
    def counters(self) -> EngineCounters: ...

    async def close(self) -> None:
        """Stop; turns still being sampled end with ``EngineError``."""
        ...


class IdleEngine:
    """The engine of a run that learns from records: weights come, and nothing is ever sampled."""

    counters = EngineCounters()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        raise AssertionError(f"{sampling.episode_key} is played where records are learnt from")

    def release(self, episode_key: str) -> None:
        """Nothing is kept."""

    def updating(self, version: Callable[[], int]) -> AbstractAsyncContextManager[None]:
        """Weights may change at any time: nobody reads them."""
        return nullcontext()

    async def close(self) -> None:
        """Nothing runs."""

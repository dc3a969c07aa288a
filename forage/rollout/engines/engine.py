"""What turns token ids into sampled token ids: the protocol that every engine speaks.

``generate`` and ``release`` come from ``forage.types.Generate``; the rest is what the loop needs
to move weights and to end. ``torch_engine`` is the implementation that needs no server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forage.types import Generate


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
        """As they are logged, since the start; shares only where something was counted."""
        metrics = {"transcript/violations": float(self.transcript_violations)}
        if self.drafted_tokens:
            metrics["rollout/drafts_accepted"] = self.accepted_tokens / self.drafted_tokens
        return metrics


class Engine(Generate, Protocol):
    """A sampler of turns whose weights can be replaced."""

    @property
    def counters(self) -> EngineCounters: ...

    async def receive_weights(self, version: int) -> None:
        """From now on sample with the trainer's weights, which are policy version ``version``."""
        ...

    async def close(self) -> None:
        """Stop; turns still being sampled end with ``EngineError``."""
        ...

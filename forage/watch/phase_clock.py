"""Where the seconds of a step go."""

from __future__ import annotations

import time


class PhaseClock:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """``phase`` ends now; it began where the one before it ended."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """As they are logged."""
        return {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}

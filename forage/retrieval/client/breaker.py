"""A circuit breaker for one server: when it is left alone, and when it is tried again.

Closed, requests pass. After failures in a row it opens: the server is ejected for a while. Then it
is half open: one request passes as a probe; if that succeeds it closes, else it opens for longer.
Time is passed in; this file sends nothing and never sleeps.
"""

from __future__ import annotations

import random

FAILURES_TO_OPEN = 5
# How long the first ejection lasts and the longest, in units of the client's first back-off.
_FIRST_EJECTION = 2.0
_LONGEST_EJECTION = 20.0


class Breaker:
    """The state of one server's circuit."""

    def __init__(self, backoff_s: float, jitter: random.Random) -> None:
        """``backoff_s``: the client's wait before a first retry, the unit of ejections."""
        self._backoff_s = backoff_s
        self._jitter = jitter
        self._num_failures = 0
        self._num_ejections = 0
        self._is_open = False
        self._is_probed = False
        self._open_until = 0.0

    @property
    def is_closed(self) -> bool:
        """Requests pass freely."""
        return not self._is_open

    def allows(self, now: float) -> bool:
        """Whether a request may be sent: always when closed, one at a time when half open."""
        return not self._is_open or (now >= self._open_until and not self._is_probed)

    def wait_s(self, now: float) -> float | None:
        """Seconds until a request may be sent; None where that depends on the probe's outcome."""
        if self._is_open and self._is_probed:
            return None
        return max(0.0, self._open_until - now) if self._is_open else 0.0

    def send(self) -> bool:
        """A request leaves; True where it is the probe."""
        is_probe = self._is_open
        self._is_probed = self._is_probed or is_probe
        return is_probe

    def succeed(self) -> None:
        """The server answered: the circuit closes."""
        self._is_open = self._is_probed = False
        self._num_failures = self._num_ejections = 0

    def abandon(self, is_probe: bool) -> None:
        """A request was cancelled and says nothing about the server."""
        if is_probe:
            self._is_probed = False

    def fail(self, now: float, is_probe: bool) -> bool:
        """The server failed; True where that ejects it now."""
        self._num_failures += 1
        if self._is_open and not is_probe:
            return False  # sent before the ejection: says nothing new
        if not self._is_open and self._num_failures < FAILURES_TO_OPEN:
            return False
        ejection = min(_FIRST_EJECTION * 2**self._num_ejections, _LONGEST_EJECTION)
        self._open_until = now + ejection * self._backoff_s * self._jitter.uniform(0.75, 1.25)
        self._num_ejections += 1
        self._is_open = True
        self._is_probed = False
        return True

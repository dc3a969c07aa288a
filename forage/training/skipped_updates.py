"""Counts updates whose gradient is not finite: a few in a row are skipped, more end the run.

Policy and critic each have a count. Checkpoints hold it, so that a resumed run ends at the same
update.
"""

from __future__ import annotations

import logging
import math

LOG = logging.getLogger(__name__)


class SkippedUpdates:
    """How many updates in a row one optimizer has skipped, and how many it may skip."""

    def __init__(self, whose: str, remedy: str, max_in_a_row: int) -> None:
        """``whose`` gradient it is, and the remedy if it is never finite, for the messages."""
        self._whose, self._remedy, self._max_in_a_row = whose, remedy, max_in_a_row
        self.num_in_a_row = 0

    def is_next(self, grad_norm: float, when: str) -> bool:
        """Whether to skip the update with this norm; ``when`` is for the messages.

        Raises ``FloatingPointError`` after more than ``max_in_a_row`` without a finite norm.
        """
        if math.isfinite(grad_norm):
            self.num_in_a_row = 0
            return False
        self.num_in_a_row += 1
        if self.num_in_a_row > self._max_in_a_row:
            raise FloatingPointError(
                f"{self._whose} gradient's norm is {grad_norm} at {when}; {self._remedy} "
                f"({self.num_in_a_row - 1} updates before it were left out for the same)"
            )
        text = "%s gradient's norm is %s at %s: this update is left out"
        LOG.warning(text, self._whose, grad_norm, when)
        return True

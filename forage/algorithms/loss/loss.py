"""The interface of a policy loss: settings, and a formula over a micro-batch's trained tokens.

Each loss is a file in this folder. ``training/objective.py`` calls ``policy_loss`` and adds the
other terms. To add a built-in, copy ``dro_loss.py`` and add a line to the union in
``config/algorithm_config.py``; to use your own, name it in the recipe (docs/your_own.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forage.settings import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Credited, Metrics, Tokens


class Loss(Frozen):
    """The settings of a policy loss, and its two calls."""

    def mark(self, credited: Sequence[Credited]) -> list[Credited]:
        """Fills in extra columns over all episodes of an optimizer step; by default, none.

        Only here does a loss see the whole optimizer step, whatever the micro-batches are.
        """
        return list(credited)

    def policy_loss(self, logprobs_M: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """The loss of each token [M] under the current policy, and metrics [M] by name."""
        raise NotImplementedError

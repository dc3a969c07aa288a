"""Predicts what tools return: a cross-entropy on the tokens of their results (ECHO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from forage.algorithms.loss.token_loss import TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Rows


class ObservationsLoss(TokenLoss):
    """Cross-entropy on the tokens of tool results (ECHO, https://arxiv.org/abs/2605.24517).

    As in the paper, our own messages (about an invalid action or a failed call) are left out, and
    the mean is over the tokens that remain. No advantage or ratio is involved. The log-probability
    is that of the run's temperature.
    """

    kind: Literal["observations"] = "observations"

    @property
    def has_teacher(self) -> bool:
        return False

    def mask(self, rows: Rows) -> Tensor:
        return rows.is_result_N

    def token_loss(self, logprobs_W: Tensor, divergence_W: Tensor) -> Tensor:
        return -logprobs_W

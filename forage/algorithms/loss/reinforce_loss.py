"""REINFORCE, weighted by the ratio to the policy that sampled.

The file to copy for another loss: its settings, its formula as a pure tensor function that gives
(loss a token, metrics a token), and ``policy_loss``, which calls that with the policy's
log-probabilities as they are now. Suffix ``_M``: the M tokens of a micro-batch that are learnt. The
union in ``config/algorithm_config.py`` gets a line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from forage.algorithms.loss.kl import bounded
from forage.settings import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Metrics, Tokens


class ReinforceLoss(Frozen):
    """REINFORCE, weighted by the probability ratio to the old policy."""

    kind: Literal["reinforce"] = "reinforce"

    def policy_loss(self, logprobs_M: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return reinforce_loss(logprobs_M, tokens.old_logprobs_M, tokens.advantages_M)


def reinforce_loss(
    logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor
) -> tuple[Tensor, Metrics]:
    """REINFORCE, weighted by the (constant) probability ratio to the old policy.

    The gradient is ``-ratio * advantage * grad log p``; where the ratio is 1 this is the estimator
    of Williams, 1992 (https://doi.org/10.1007/BF00992696).
    """
    ratio_M = bounded(logprobs_M.detach() - old_logprobs_M).exp()
    return -ratio_M * advantages_M * logprobs_M, {}

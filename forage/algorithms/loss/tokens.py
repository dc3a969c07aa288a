"""What a loss is handed of a micro-batch, what it gives back.

A loss is a file beside this one: its settings, its formula as a pure tensor function that returns
(loss a token, metrics a token), and ``policy_loss``, which calls the formula on the policy's
log-probabilities as they are now. Tokens that the policy did not sample never get here. Suffix
``_M``: the M sampled tokens of a micro-batch. To add a loss, copy ``reinforce_loss.py`` and add a
line to the union in ``config/algorithm_config.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forage.algorithms.packing import sequence_numbers
from forage.batch import Rows

Metrics = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a micro-batch says of its M sampled tokens, on the trainer's device."""

    sampler_logprobs_M: Tensor
    old_logprobs_M: Tensor
    """Of the policy that the ratio is taken to: the sampler, or the trainer before the update."""
    reference_logprobs_M: Tensor
    weights_M: Tensor
    advantages_M: Tensor
    versions_M: Tensor
    staleness_M: Tensor
    """The trainer's version less the one that sampled the token."""
    turn_of_M: Tensor
    sequence_of_M: Tensor
    num_sequences: int

    @staticmethod
    def of(rows: Rows, device: torch.device, version: int = 0) -> Tokens:
        """Those of ``rows``, moved to ``device``; the trainer is at policy ``version``."""
        chosen = rows.is_sampled_N
        return Tokens(
            sampler_logprobs_M=rows.logprobs_N[chosen].to(device),
            old_logprobs_M=rows.old_logprobs_N[chosen].to(device),
            reference_logprobs_M=rows.reference_logprobs_N[chosen].to(device),
            weights_M=rows.weights_N[chosen].to(device),
            advantages_M=rows.advantages_N[chosen].to(device),
            versions_M=rows.versions_N[chosen].to(device),
            staleness_M=version - rows.versions_N[chosen].to(device).float(),
            turn_of_M=rows.turns_N[chosen].to(device),
            sequence_of_M=sequence_numbers(rows.packed)[chosen].to(device),
            num_sequences=len(rows.packed.starts_S1) - 1,
        )

"""Compares the trainer's packed rows with transformers' forward of each sequence alone."""

from __future__ import annotations

import torch
from torch import Tensor

from forage.algorithms.packing import lay_end_to_end
from forage.models import attention
from forage.models.self_check import checking, raise_if_apart, sequences
from forage.training.logprobs import TokenLogprobs


def check_packed(policy: TokenLogprobs) -> None:
    """Raise ``UserError`` if the policy's log-probabilities are not those of transformers.

    Ranks call it together. Rows are not cut over ranks meanwhile.
    """
    model, sequence_ranks = policy.model, policy.sequence_ranks
    policy.sequence_ranks = None
    rows = sequences(model)
    try:
        with checking(model):
            model.set_attn_implementation("eager")
            # It reads no ``attend``, so a row of one sequence is transformers' own forward.
            expected_M = torch.cat([_logprobs(policy, [row]) for row in rows])
            attention.install(model)
            together_M = _logprobs(policy, rows)
    finally:
        policy.sequence_ranks = sequence_ranks
    raise_if_apart(model, "sequences packed into one row", together_M, expected_M)


def _logprobs(policy: TokenLogprobs, rows: list[tuple[int, ...]]) -> Tensor:
    packed = lay_end_to_end(rows)
    return policy(packed, packed.positions_N > 0, 1.0)[0]

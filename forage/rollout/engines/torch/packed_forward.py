"""One CPU pass over all waiting tokens: single new tokens and whole observations together.

A small model's pass has mostly fixed costs, so decoding and prefilling share one, laid end to end
in one row. A large pass is split into parts, one per core, because the individual operations are
too short to split. Only attention runs slot by slot. The pass is exact only if rows do not depend
on each other, which ``forward.rows_are_independent`` tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forage.config.placement_config import TorchPlacement
from forage.models.head import logits_of
from forage.rollout.engines.torch.slot_attend import SlotAttend
from forage.rollout.engines.torch.slots import SlotCache, Stretch, round_up

MIN_PART_COST = 200
"""Minimum cost of a part that gets its own core, in observation tokens, for a small model."""
_SMALL_MODEL = 1_000_000
"""Parameters of the largest model for which ``MIN_PART_COST`` was measured."""
SINGLE_COST = 2
"""A single new token's cost in observation tokens: it shares its key reads with no other."""
OVERHEAD_TOKENS = 24
"""A pass's fixed cost, in single tokens (benchmarks/engine.md)."""


class PackedForward:
    """A ``Forward`` that computes the tokens of all stretches at once."""

    rounds_ahead = 0

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, config: TorchPlacement, num_threads: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._multiple = config.tile_rows
        self._bucket = config.prefill_bucket
        self._num_threads = num_threads
        # Drafted tokens attend row by row, and a recurrent state cannot undo a wrong draft.
        takes_drafts = cache.dtype == torch.float32 and cache.states is None
        self.overhead_tokens = OVERHEAD_TOKENS if takes_drafts else None
        self._min_part_cost = min_part_cost(model.num_parameters(), self._multiple)
        self._pool = ThreadPoolExecutor(num_threads, "forage-engine", torch.set_num_threads, (1,))

    def __call__(self, stretches: Sequence[Stretch]) -> Tensor:
        """Logits [B, V] after each stretch's last known token and each drafted one."""
        costs = [_cost(stretch) for stretch in stretches]
        parts = equal_parts(costs, self._num_threads, self._min_part_cost)
        if len(parts) == 1:
            return self._compute(stretches)
        ends = list(accumulate(1 + stretch.num_drafted for stretch in stretches))
        spans = [
            range(end - 1 - s.num_drafted, end) for end, s in zip(ends, stretches, strict=True)
        ]
        head = self._model.get_output_embeddings()
        assert head is not None, "a causal language model has a head"
        out_BV = torch.empty(ends[-1], head.weight.shape[0], dtype=self._cache.dtype)

        def compute(part: list[int]) -> None:
            rows = torch.tensor([row for index in part for row in spans[index]])
            with torch.inference_mode():
                out_BV[rows] = self._compute([stretches[index] for index in part])

        list(self._pool.map(compute, with_neighbours(parts, stretches)))
        return out_BV

    def take_tokens(self, slots: Sequence[int], tokens_B: Tensor) -> None:
        """Does nothing: tokens are read before the next round."""

    def take_weights(self) -> None:
        """Does nothing: each pass reads the weights anew."""

    def close(self) -> None:
        self._pool.shutdown()

    @torch.inference_mode()
    def _compute(self, stretches: Sequence[Stretch]) -> Tensor:
        order = sorted(range(len(stretches)), key=lambda index: not stretches[index].is_single)
        laid = [stretches[index] for index in order]
        num_tokens = sum(len(stretch.token_ids) for stretch in laid)
        padding = [0] * (round_up(num_tokens, self._multiple) - num_tokens)
        ids = [token for stretch in laid for token in stretch.token_ids]
        positions = [place for s in laid for place in range(s.start, s.end)]
        hidden = self._model.base_model(
            input_ids=torch.tensor([ids + padding]),
            position_ids=torch.tensor([positions + padding]),
            use_cache=False,
            attend=SlotAttend(self._cache, laid, self._bucket, self._multiple),
        ).last_hidden_state[0]
        ends = np.empty(len(laid), dtype=np.int64)
        ends[order] = np.cumsum([len(stretch.token_ids) for stretch in laid])
        wanted = [
            row
            for end, stretch in zip(ends.tolist(), stretches, strict=True)
            for row in range(end - 1 - stretch.num_drafted, end)
        ]
        rows = torch.zeros(round_up(len(wanted), self._multiple), dtype=torch.long)
        rows[: len(wanted)] = torch.tensor(wanted)
        return logits_of(self._model, hidden[rows])[: len(wanted)]


def min_part_cost(num_parameters: int, multiple: int) -> int:
    """The minimum cost of a part: lower for larger models, but at least its padded rows.

    ``min_part_cost(870_000, 16)`` gives 200, ``min_part_cost(134_515_008, 8)`` gives 16.
    """
    scaled = MIN_PART_COST * _SMALL_MODEL // max(num_parameters, 1)
    return min(MIN_PART_COST, max(scaled, SINGLE_COST * multiple))


def equal_parts(costs: Sequence[int], most: int, min_cost: int = MIN_PART_COST) -> list[list[int]]:
    """Splits indices into at most ``most`` parts of similar cost; fewer if there is little work.

    ``equal_parts([90, 5, 60, 40], 2)`` gives ``[[0, 1], [2, 3]]``.
    """
    num_parts = max(1, min(most, sum(costs) // min_cost))
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        lightest = totals.index(min(totals))
        parts[lightest].append(index)
        totals[lightest] += costs[index]
    return [sorted(part) for part in parts if part]


def with_neighbours(parts: list[list[int]], stretches: Sequence[Stretch]) -> list[list[int]]:
    """Redistributes single tokens so that each part has adjacent slots, which attend together.

    Each part keeps its number of single tokens and its longer stretches.
    """
    by_slot = sorted(
        (i for part in parts for i in part if stretches[i].is_single),
        key=lambda index: stretches[index].slot,
    )
    singles = iter(by_slot)
    return [[next(singles) if stretches[i].is_single else i for i in part] for part in parts]


def _cost(stretch: Stretch) -> int:
    num_tokens = len(stretch.token_ids)
    return SINGLE_COST * num_tokens if stretch.is_single else num_tokens

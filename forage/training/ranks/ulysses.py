"""Sequence parallelism: the tokens of a row are cut over ranks, and attention over heads.

Each rank holds a stretch of a packed row. Around attention, queries, keys and values change hands:
from all heads of a stretch to some heads of the whole row, and back (DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509, section 3). Attention itself is the packed one, unchanged.

A row of 7 tokens on 2 ranks, the last one being padding, a sequence of its own::

    token      0 1 2 3 4 5 6 .
    rank       0 0 0 0 1 1 1 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import pad

from forage.batch import Packed
from forage.errors import UserError
from forage.models.attention import Attend, Scoring
from forage.models.recurrence import RecurrentStates
from forage.training.packed_attention import PackedAttend


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks that a row is cut over, and this rank's place among them."""

    group: ProcessGroup
    rank: int
    size: int

    def stretch(self, packed: Packed) -> tuple[Packed, Attend]:
        """This rank's tokens of the row, padded to equal stretches, and the attention over all."""
        num_tokens = len(packed.token_ids_N)
        padding = -num_tokens % self.size
        starts_S1 = packed.starts_S1 + ((num_tokens + padding,) if padding else ())
        own = self._own(num_tokens)
        mine = Packed(
            pad(packed.token_ids_N, (0, padding))[own],
            pad(packed.positions_N, (0, padding))[own],
            packed.starts_S1,
        )
        return mine, _UlyssesAttend(self, PackedAttend(starts_S1))

    def own_before(self, is_wanted_N: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the wanted tokens are predicted in this stretch [M], and where in it [m]."""
        before_M = is_wanted_N.nonzero()[:, 0] - 1
        own = self._own(len(is_wanted_N))
        is_mine_M = (before_M >= own.start) & (before_M < own.stop)
        return is_mine_M, before_M[is_mine_M] - own.start

    def join(self, values_m: Tensor, is_wanted_N: Tensor) -> Tensor:
        """The values of all wanted tokens [M], of which this rank has computed its own [m].

        Each rank goes on to compute the same loss from them, so each takes its own gradients back,
        unsummed.
        """
        own = self._own(len(is_wanted_N))
        owner_M = (is_wanted_N.nonzero()[:, 0] - 1) // (own.stop - own.start)
        counts = torch.bincount(owner_M, minlength=self.size).tolist()
        joined = _Join.apply(values_m, self, counts)
        assert isinstance(joined, Tensor), "torch leaves the type of what a function gives open"
        return joined

    def _own(self, num_tokens: int) -> slice:
        length = -(-num_tokens // self.size)
        return slice(self.rank * length, (self.rank + 1) * length)


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Raise ``UserError`` where attention's heads cannot be cut over so many ranks."""
    if num_heads % num_ranks or (num_kv_heads % num_ranks and num_ranks % num_kv_heads):
        raise UserError(
            f"placement.trainer.sequence_parallel is {num_ranks}, and each rank has {num_heads} "
            f"heads and {num_kv_heads} key-value heads, which it neither divides nor repeats: set "
            "it to a divisor"
        )


def check_not_recurrent(is_recurrent: bool, num_ranks: int) -> None:
    """Raise ``UserError`` if rows of a model with recurrent layers are to be cut over ranks."""
    if is_recurrent and num_ranks > 1:
        raise UserError(
            f"placement.trainer.sequence_parallel is {num_ranks}, and the model has recurrent "
            "layers, whose tokens follow from each other and cannot be cut over ranks: set it to 1"
        )


class _UlyssesAttend:
    """Attention over the whole row for a part of the heads, by ranks that hold stretches of it."""

    def __init__(self, ranks: SequenceRanks, attend: PackedAttend) -> None:
        self._ranks = ranks
        self._attend = attend

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        size, num_kv_heads = self._ranks.size, key.shape[1]
        if num_kv_heads < size:  # each rank takes a head, and some take the same one
            key = key.repeat_interleave(size // num_kv_heads, dim=1)
            value = value.repeat_interleave(size // num_kv_heads, dim=1)
        query, key, value = (self._to_heads(each) for each in (query, key, value))
        if scoring.sinks_H is not None:
            own = scoring.sinks_H.tensor_split(size)[self._ranks.rank]
            scoring = replace(scoring, sinks_H=own)
        return self._to_tokens(self._attend(layer, query, key, value, scoring))

    def recur(
        self,
        layer: str,
        run: Callable[[Tensor, RecurrentStates | None], Tensor],
        hidden: Tensor,
    ) -> Tensor:
        raise AssertionError("check_fits refuses recurrent layers before the run")

    def _to_heads(self, each: Tensor) -> Tensor:
        """A stretch of all heads for all of some heads: [1, H, n, D] -> [1, h, N, D]."""
        size = self._ranks.size
        _, num_heads, num_tokens, head_dim = each.shape
        sent = each.reshape(size, num_heads // size, num_tokens, head_dim)
        came = self._exchange(sent)
        return came.transpose(0, 1).reshape(1, num_heads // size, size * num_tokens, head_dim)

    def _to_tokens(self, each: Tensor) -> Tensor:
        """The way back; attention gives tokens before heads: [1, N, h, D] -> [1, n, H, D]."""
        size = self._ranks.size
        _, num_tokens, num_heads, head_dim = each.shape
        came = self._exchange(each.reshape(size, num_tokens // size, num_heads, head_dim))
        return came.transpose(0, 1).reshape(1, num_tokens // size, size * num_heads, head_dim)

    def _exchange(self, each: Tensor) -> Tensor:
        """Part i of ``each`` to rank i; what comes from rank i is part i."""
        came = all_to_all_single_autograd(each.contiguous(), None, None, self._ranks.group)
        return came.reshape(each.shape)


class _Join(torch.autograd.Function):
    """Parts of a vector from all ranks, one after the other; backwards each keeps its own part."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, ranks: SequenceRanks, counts: list[int]) -> Tensor:
        ctx.start = sum(counts[: ranks.rank])
        ctx.size = counts[ranks.rank]
        longest = max(counts)
        padded = pad(mine.detach(), (0, longest - len(mine)))
        parts = [torch.empty_like(padded) for _ in counts]
        all_gather(parts, padded.contiguous(), group=ranks.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch types it loosely
        return gradient[ctx.start : ctx.start + ctx.size], None, None

"""What the trainer is handed: credited episodes, packed rows, and the batch of an optimizer step.

Plain data between the algorithms, which fill it in, and the trainer, which learns from it. Axis
suffixes: ``_N`` tokens laid end to end, ``_M`` the sampled ones among them, ``_S`` sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from forage.types import Episode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Metrics = dict[str, "Tensor"]
"""What is measured of tokens, by name: a number each [M]."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """An episode on its way into the loss: what is known of each of its M sampled tokens, in order.

    It starts neutral (``packing.unweighed``) and each stage fills in its part. All float32 [M] but
    what ``is_`` begins (bool): ``old_logprobs_M`` of the policy that the loss's ratio is taken to,
    ``reference_logprobs_M`` of the reference model (the old ones where there is none),
    ``weights_M`` that correct for the sampler (1), ``is_kept_M`` false where the correction
    rejects (true), ``values_M`` of the critic before the update (0), ``returns_M`` that it learns
    (0), ``energies_M`` that the optimal token baseline reads (0), ``advantages_M`` (0),
    ``is_picked_M`` (bool) true where a loss by covariance picks the token of its step (false).
    ``gains_T`` are what each turn added to the belief in the golden answer (0).
    """

    episode: Episode
    old_logprobs_M: Tensor
    reference_logprobs_M: Tensor
    weights_M: Tensor
    is_kept_M: Tensor
    values_M: Tensor
    returns_M: Tensor
    energies_M: Tensor
    advantages_M: Tensor
    is_picked_M: Tensor
    gains_T: Tensor

    @property
    def columns(self) -> dict[str, Tensor]:
        """What is known of each token, by the name of the field."""
        names = [each.name for each in fields(self) if each.name.endswith("_M")]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Packed:
    """Token sequences laid end to end for one forward pass: ``N`` tokens, ``S`` sequences.

    ``token_ids_N`` and ``positions_N`` are int64, and positions restart at 0 with each sequence;
    ``starts_S1`` are the S + 1 boundaries.
    """

    token_ids_N: Tensor
    positions_N: Tensor
    starts_S1: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which of ``count`` sequences, or turns, each of M tokens is of; all are whole here."""

    number_of_M: Tensor
    count: int

    def sums(self, values_M: Tensor) -> Tensor:
        """The sum of each sequence's tokens [S]."""
        return values_M.new_zeros(self.count).index_add(0, self.number_of_M, values_M)

    def means(self, values_M: Tensor) -> Tensor:
        """The mean of each sequence's tokens [S]; 0 where it has none."""
        return self.sums(values_M) / self.sums(values_M.new_ones(values_M.shape)).clamp(min=1)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the M tokens of a micro-batch that are learnt, in their order, each [M].

    ``turn_of_M`` numbers the turns of the micro-batch, ``trainer_version`` is the policy version
    that learns, and the rest is the engine's word or ``Weighed``'s.
    """

    sampler_logprobs_M: Tensor
    old_logprobs_M: Tensor
    reference_logprobs_M: Tensor
    weights_M: Tensor
    values_M: Tensor
    returns_M: Tensor
    advantages_M: Tensor
    is_picked_M: Tensor
    versions_M: Tensor
    turn_of_M: Tensor
    sequences: Sequences
    trainer_version: int = 0

    @property
    def staleness_M(self) -> Tensor:
        """The trainer's version less the one that sampled the token."""
        return self.trainer_version - self.versions_M.float()

    def moved(self, device: torch.device, trainer_version: int = 0) -> Tokens:
        """The same on ``device``, to be learnt by this policy version."""
        names = [each.name for each in fields(self) if each.name.endswith("_M")]
        tensors = {name: getattr(self, name).to(device) for name in names}
        numbers = replace(self.sequences, number_of_M=self.sequences.number_of_M.to(device))
        return replace(self, **tensors, sequences=numbers, trainer_version=trainer_version)


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch: packed episodes, whole, and what the loss needs to know about their tokens.

    ``is_sampled_N`` is true where the policy chose the token and no correction has rejected it;
    ``tokens`` are those. Token i is predicted at i - 1.
    """

    packed: Packed
    is_sampled_N: Tensor
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step learns: micro-batches, and the global counts to divide losses by."""

    rows: tuple[Rows, ...]
    num_sampled_tokens: int
    num_sequences: int

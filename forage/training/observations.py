"""An ablation: episodes whose observations are trained as if the policy had written them.

Used between credit and packing where ``algorithm.train_observations`` asks for it, and nowhere
else. It shows what masking is good for; by default only sampled tokens are trained, and nothing of
this module runs.

A worked example: prompt 1 2, sampled 3 4, observation 5, sampled 6, advantage 0.5::

    token_ids        1    2    3    4    5    6
    trained          .    .    x    x    x    x
    was observed     .    .    .    .    x    .
    advantages       .    .   .5   .5   .5   .5
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forage.batch import Weighed
from forage.types import Origin, Segment


@dataclass(frozen=True, slots=True)
class Unmasked:
    """An episode in which observations count as sampled; ``was_observed_M`` marks their tokens."""

    weighed: Weighed
    was_observed_M: Tensor


def unmask(each: Weighed) -> Unmasked:
    """Take the observations of an episode into what is trained.

    A token of an observation gets advantage, rejection and policy version of the sampled token
    before it, and full weight. Its log-probabilities are 0 until ``fill_in``: no engine has ever
    given any. What stands before the first sampled token stays out.
    """
    segments: list[Segment] = []
    taken_from: list[int] = []
    was_observed: list[bool] = []
    num_sampled, version = 0, 0
    for segment in each.episode.segments:
        size = len(segment.token_ids_T)
        is_sampled = segment.origin is Origin.SAMPLED
        if is_sampled:
            taken_from += range(num_sampled, num_sampled + size)
            num_sampled += size
            version = segment.versions_T[-1] if size else version
        elif segment.origin is Origin.OBSERVATION and num_sampled:
            taken_from += [num_sampled - 1] * size
            zeros, versions = (0.0,) * size, (version,) * size
            segment = Segment(Origin.SAMPLED, segment.token_ids_T, zeros, versions)
        else:
            size = 0
        was_observed += [not is_sampled] * size
        segments.append(segment)
    from_M = torch.tensor(taken_from, dtype=torch.int64)
    was_observed_M = torch.tensor(was_observed, dtype=torch.bool)
    weighed = Weighed(
        episode=replace(each.episode, segments=tuple(segments)),
        old_logprobs_M=each.old_logprobs_M[from_M].masked_fill(was_observed_M, 0.0),
        reference_logprobs_M=each.reference_logprobs_M[from_M].masked_fill(was_observed_M, 0.0),
        weights_M=each.weights_M[from_M].masked_fill(was_observed_M, 1.0),
        is_kept_M=each.is_kept_M[from_M],
        values_M=each.values_M[from_M],
        returns_M=each.returns_M[from_M],
        advantages_M=each.advantages_M[from_M],
    )
    return Unmasked(weighed, was_observed_M)


def fill_in(unmasked: Unmasked, logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Weighed:
    """The episode with what policy and reference say of its observations; the rest is kept."""
    each, was_observed_M = unmasked.weighed, unmasked.was_observed_M
    segments: list[Segment] = []
    start = 0
    for segment in each.episode.segments:
        end = start + len(segment.logprobs_T)
        if end > start and bool(was_observed_M[start]):
            segment = replace(segment, logprobs_T=tuple(logprobs_M[start:end].tolist()))
        start = end
        segments.append(segment)
    return replace(
        each,
        episode=replace(each.episode, segments=tuple(segments)),
        old_logprobs_M=torch.where(was_observed_M, logprobs_M, each.old_logprobs_M),
        reference_logprobs_M=torch.where(
            was_observed_M, reference_logprobs_M, each.reference_logprobs_M
        ),
    )

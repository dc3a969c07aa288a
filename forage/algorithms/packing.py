"""Groups to batch: episodes laid end to end in micro-batches of a token budget.

Every mask, log-probability and advantage is derived from the segments of the transcript; nothing
is padded, so nothing is told from padding. Which rows share a micro-batch changes no gradient.

A worked example: prompt 1 2, sampled 3 4, observation 5, sampled 6, with advantage 0.5::

    token_ids   1    2    3    4    5    6
    is_sampled  .    .    x    x    .    x
    advantages  0    0   .5   .5    0   .5
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forage.types import Batch, Episode, Group, Origin, Packed, Rows


def pack(
    groups: Sequence[Group],
    advantages_P: Sequence[Sequence[float | None]],
    max_tokens: int,
) -> Batch:
    """Lay the episodes that have an advantage into micro-batches of at most ``max_tokens``.

    Raises ``AssertionError`` for an episode longer than that (the config rules it out).
    """
    weighed = [
        (episode, advantage)
        for group, advantages_G in zip(groups, advantages_P, strict=True)
        for episode, advantage in zip(group.episodes_G, advantages_G, strict=True)
        if advantage is not None and episode.num_sampled_tokens > 0
    ]
    sizes = [episode.num_tokens for episode, _ in weighed]
    rows = tuple(_lay([weighed[i] for i in bin_]) for bin_ in first_fit(sizes, max_tokens))
    num_sampled_tokens = sum(episode.num_sampled_tokens for episode, _ in weighed)
    return Batch(rows, num_sampled_tokens, len(weighed))


def first_fit(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of ``sizes`` in bins of at most ``max_tokens``, the largest first (stable)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        assert size <= max_tokens, f"{size} tokens do not fit a micro-batch of {max_tokens}"
        bin_ = next((i for i, left in enumerate(room) if left >= size), None)
        if bin_ is None:
            bin_ = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[bin_].append(index)
        room[bin_] -= size
    return bins


def lay_end_to_end(sequences: Sequence[Sequence[int]]) -> Packed:
    """Token sequences one after the other, each with positions of its own."""
    starts = [0]
    for token_ids in sequences:
        starts.append(starts[-1] + len(token_ids))
    return Packed(
        torch.tensor([i for token_ids in sequences for i in token_ids], dtype=torch.int64),
        torch.tensor(
            [i for token_ids in sequences for i in range(len(token_ids))], dtype=torch.int64
        ),
        tuple(starts),
    )


def _lay(weighed: Sequence[tuple[Episode, float]]) -> Rows:
    is_sampled: list[bool] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    for episode, advantage in weighed:
        for segment in episode.segments:
            size = len(segment.token_ids_T)
            was_sampled = segment.origin is Origin.SAMPLED
            is_sampled.extend([was_sampled] * size)
            logprobs.extend(segment.logprobs_T if was_sampled else [0.0] * size)
            advantages.extend([advantage if was_sampled else 0.0] * size)
            versions.extend(segment.versions_T if was_sampled else [0] * size)
    return Rows(
        packed=lay_end_to_end([episode.token_ids_T for episode, _ in weighed]),
        is_sampled_N=torch.tensor(is_sampled, dtype=torch.bool),
        logprobs_N=torch.tensor(logprobs, dtype=torch.float32),
        advantages_N=torch.tensor(advantages, dtype=torch.float32),
        versions_N=torch.tensor(versions, dtype=torch.int64),
    )

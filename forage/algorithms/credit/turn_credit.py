"""Credit for single turns: a reward at each, discounted over the turns after it.

A search that first brings the gold passage up is worth something even if the answer then fails,
and each search costs something even if the answer is right. A worked example, discount 0.5, bonus
0.3 for the second turn, cost 0.1 a search, outcome 1::

    turn        search   search   answer
    reward       -0.1      0.2       1
    return       0.25      0.7       1

Pure functions of numbers. What a turn did is told by the caller; tokens are counted by
``turn_lengths``, which reads the segments' origins.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from forage.algorithms.credit.advantages import STD_EPSILON
from forage.algorithms.credit.gae import discounted_returns
from forage.types import Origin, Segment


def turn_lengths(segments: Sequence[Segment]) -> list[int]:
    """How many tokens each turn sampled."""
    return [len(s.token_ids_T) for s in segments if s.origin is Origin.SAMPLED]


def turn_rewards(
    outcome: float,
    is_search_T: Sequence[bool],
    surfaces_gold_T: Sequence[bool],
    retrieval_bonus: float,
    search_cost: float,
) -> list[float]:
    """One reward a turn: the bonus for the first that surfaces the gold passage, the cost of each
    search, and the outcome with the last turn.

    ``_T`` are turns here. An episode without a turn has none.
    """
    rewards = [-search_cost if is_search else 0.0 for is_search in is_search_T]
    first = next((i for i, surfaces in enumerate(surfaces_gold_T) if surfaces), None)
    if first is not None:
        rewards[first] += retrieval_bonus
    if rewards:
        rewards[-1] += outcome
    return rewards


def turn_level_advantages(
    rewards_GT: Sequence[Sequence[float] | None], discount: float, normalise_by_std: bool
) -> list[list[float] | None]:
    """Each turn's discounted return against the group's returns of the same turn.

    A turn that one episode alone got to is compared with the returns of the group's first turns.
    With ``normalise_by_std`` all are divided by the standard deviation of the group's returns. An
    episode that is kept out is None. Turn-level credit with a group's baseline is that of
    https://arxiv.org/abs/2505.11821; the return of a turn is REINFORCE's reward-to-go.
    """
    returns_GT = [None if r is None else discounted_returns(r, discount) for r in rewards_GT]
    kept = [returns for returns in returns_GT if returns]
    by_turn: list[list[float]] = []
    for index in range(max(map(len, kept), default=0)):
        by_turn.append([returns[index] for returns in kept if len(returns) > index])
    baselines = [_mean(returns if len(returns) > 1 else by_turn[0]) for returns in by_turn]
    scale = 1.0
    if normalise_by_std:
        everything = [value for returns in kept for value in returns]
        scale = _sample_std(everything) + STD_EPSILON
    return [
        None
        if returns is None
        else [(value - b) / scale for value, b in zip(returns, baselines, strict=False)]
        for returns in returns_GT
    ]


def over_tokens(values_T: Sequence[float], lengths_T: Sequence[int]) -> list[float]:
    """A turn's value for each token that it sampled."""
    assert len(values_T) == len(lengths_T), "a turn is one stretch of sampled tokens"
    return [value for value, n in zip(values_T, lengths_T, strict=True) for _ in range(n)]


def at_turn_ends(rewards_T: Sequence[float], lengths_T: Sequence[int]) -> list[float]:
    """A turn's reward with the last token that it sampled, 0 with the others.

    What a turn without a token earned goes to the token before it, so that nothing is lost.
    """
    assert len(rewards_T) == len(lengths_T), "a turn is one stretch of sampled tokens"
    rewards_M = [0.0] * sum(lengths_T)
    end = 0
    for reward, length in zip(rewards_T, lengths_T, strict=True):
        end += length
        if rewards_M:
            rewards_M[max(end - 1, 0)] += reward
    return rewards_M


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sample_std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))

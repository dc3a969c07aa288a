"""OPO: rewards minus the group's mean weighted by episode length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator


class Opo(Estimator):
    """The reward minus the group's length-weighted mean."""

    kind: Literal["opo"] = "opo"

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> Sequence[float]:
        return opo_advantages(rewards_G, [sum(each.lengths_T) for each in group.members_G])


def opo_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> tuple[float, ...]:
    """Reward minus sum(length * reward) / sum(length); a group of one gets 0.

    ``lengths_G`` are sampled tokens. The baseline minimises the variance of a gradient whose norm
    grows with the length. Source: https://arxiv.org/abs/2505.23585; veRL's ``opo``.
    """
    total = sum(lengths_G)
    weighted = sum(n * reward for n, reward in zip(lengths_G, rewards_G, strict=True))
    baseline = weighted / total if total else 0.0
    return tuple(reward - baseline for reward in rewards_G)

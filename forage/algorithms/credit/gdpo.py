"""GDPO: reward components normalised separately within the group, then summed and whitened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator
from forage.algorithms.credit.grpo import grpo_advantages


class Gdpo(Estimator):
    """The weighted sum of each component's group advantage, whitened (2601.05242)."""

    kind: Literal["gdpo"] = "gdpo"
    parts: Mapping[str, float] = Field(min_length=1)
    """Reward components with their weights, for example {em: 1, format_valid: 0.5}."""
    normalise_by_std: bool = True
    """Divide each component by its standard deviation in the group."""

    @property
    def is_whitened(self) -> bool:
        return True

    @property
    def reads_parts(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> Sequence[float]:
        parts_GK = [each.parts_K for each in group.members_G]
        return gdpo_advantages(parts_GK, tuple(self.parts.values()), self.normalise_by_std)


def gdpo_advantages(
    parts_GK: Sequence[Sequence[float]], weights_K: Sequence[float], normalise_by_std: bool
) -> tuple[float, ...]:
    """The sum over components k of weight_k times GRPO's advantage of k, before whitening.

    A component that varies little keeps its influence next to one that varies a lot. Source:
    https://arxiv.org/abs/2601.05242; veRL's ``gdpo``.
    """
    by_part_KG = [
        grpo_advantages(part_G, normalise_by_std) for part_G in zip(*parts_GK, strict=True)
    ]
    return tuple(
        sum(weight * each for weight, each in zip(weights_K, row_K, strict=True))
        for row_K in zip(*by_part_KG, strict=True)
    )

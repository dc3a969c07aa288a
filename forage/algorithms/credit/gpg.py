"""GPG: rewards minus the group's mean, rescaled to make up for groups without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forage.algorithms.credit.estimator import EarnedByGroup, Estimator
from forage.algorithms.credit.grpo import grpo_advantages


class Gpg(Estimator):
    """The reward minus the group's mean, times a factor per step."""

    kind: Literal["gpg"] = "gpg"
    rescale_by: Literal["groups", "rewards"] = "groups"
    """The factor: all groups / varied groups (paper), or episodes / rewarded episodes (veRL)."""

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> Sequence[float]:
        return grpo_advantages(rewards_G, normalise_by_std=False)

    def step_factor(self, totals_P: Sequence[Sequence[float]]) -> float:
        return gpg_factor(totals_P, self.rescale_by)


def gpg_factor(
    totals_P: Sequence[Sequence[float]], rescale_by: Literal["groups", "rewards"]
) -> float:
    """The factor that makes up for flat groups or unrewarded episodes, which have no gradient.

    Source: https://arxiv.org/abs/2504.02546 (``groups``); veRL's ``gpg`` divides the number of
    episodes by the number of nonzero rewards (``rewards``).
    """
    if rescale_by == "groups":
        varied = [max(totals_G) > min(totals_G) for totals_G in totals_P if totals_G]
        return len(varied) / max(sum(varied), 1)
    rewarded = [total != 0 for totals_G in totals_P for total in totals_G]
    return len(rewarded) / max(sum(rewarded), 1)

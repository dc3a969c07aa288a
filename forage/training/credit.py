"""From the scored groups of a step to an advantage for every sampled token, as the settings say.

Stands between the rollout and the trainer: it reads rewards, turns, and the results of the forward
passes (``forward_passes.py``), and fills in advantages and the critic's targets. The estimator of
the settings has the formula; only the running baseline is kept from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from forage.algorithms.credit.baselines import next_baseline, whiten
from forage.algorithms.credit.estimator import Earned, EarnedByGroup
from forage.algorithms.dynamic_sampling import is_flat
from forage.algorithms.packing import unweighed
from forage.batch import Weighed
from forage.config.algorithm_config import AlgorithmConfig
from forage.training.earnings import Ledger
from forage.types import Episode, Group


class Credit:
    """Turns what groups earned into advantages."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        train_on_failed_searches: bool,
        baseline: float | None = None,
    ) -> None:
        self.baseline = baseline
        """The running baseline; None before the first step, or where none is kept."""
        self._algorithm = algorithm
        self._estimator = algorithm.advantage
        self._ledger = Ledger(algorithm, train_on_failed_searches)

    def is_learnable(self, episode: Episode) -> bool:
        """Whether an episode may enter the loss."""
        return self._ledger.is_learnable(episode)

    def is_flat(self, group: Group) -> bool:
        """Whether the group's episodes earned the same, so that it teaches nothing."""
        return is_flat(
            [None if e is None else e.total for e in self._ledger.earned_by_group(group)]
        )

    def unweighed(self, groups: Sequence[Group]) -> list[list[Weighed]]:
        """The learnable episodes of each group, with nothing known of them yet."""
        return [
            [unweighed(episode) for episode in group.episodes_G if self.is_learnable(episode)]
            for group in groups
        ]

    def weigh(
        self, groups: Sequence[Group], views_P: Sequence[Sequence[Weighed]], kl_coefficient: float
    ) -> tuple[list[list[Weighed]], dict[str, float]]:
        """Advantages, and the critic's targets, of the learnable episodes; and metrics.

        ``views_P`` are those of ``unweighed``, looked at. The running baseline takes the step in.
        """
        weighed_P: list[list[Weighed]] = []
        totals: list[float] = []
        for group, views in zip(groups, views_P, strict=True):
            earned_G = self._ledger.earned_by_group(group)
            kept = [earned for earned in earned_G if earned is not None]
            weighed_P.append(self._weigh_group(group, kept, views, kl_coefficient))
            totals += [earned.total for earned in kept]
        if self._estimator.is_whitened:
            weighed_P = _whitened(weighed_P)
        decay = self._estimator.baseline_decay
        if decay is not None:
            self.baseline = next_baseline(self.baseline, totals, decay)
        return weighed_P, self._metrics(groups, weighed_P, totals)

    def _weigh_group(
        self,
        group: Group,
        earned: Sequence[Earned],
        views: Sequence[Weighed],
        kl_coefficient: float,
    ) -> list[Weighed]:
        """The episodes of a group with their credit; none where its baseline could not be had."""
        members_G = [
            replace(
                each,
                penalties_M=self._kl_penalties(view, kl_coefficient),
                values_M=view.values_M.tolist(),
            )
            for each, view in zip(earned, views, strict=True)
        ]
        greedy = self._greedy_reward(group) if self._estimator.plays_greedy else None
        credit = self._estimator.credit(EarnedByGroup(members_G, self.baseline, greedy))
        return [
            replace(
                view,
                advantages_M=torch.tensor(each.advantages_M, dtype=torch.float32),
                returns_M=view.returns_M
                if each.returns_M is None
                else torch.tensor(each.returns_M, dtype=torch.float32),
            )
            for view, each in zip(views, credit, strict=bool(credit))
        ]

    def _kl_penalties(self, view: Weighed, kl_coefficient: float) -> list[float]:
        """What the leash takes off the reward, a token each."""
        kl = self._algorithm.kl
        if kl is None or kl.place != "reward" or not kl_coefficient:
            return [0.0] * len(view.old_logprobs_M)
        kl_M = kl.estimate(view.old_logprobs_M.double(), view.reference_logprobs_M.double())
        return (kl_coefficient * kl_M).tolist()

    def _greedy_reward(self, group: Group) -> float | None:
        """What the group's greedy episode earned; None where something failed it."""
        assert group.greedy is not None, "the scheduler plays a greedy episode a question"
        if not self.is_learnable(group.greedy):
            return None
        return self._ledger.earned_by(group.greedy).total

    def _metrics(
        self,
        groups: Sequence[Group],
        weighed_P: Sequence[Sequence[Weighed]],
        totals: Sequence[float],
    ) -> dict[str, float]:
        num_episodes = sum(len(group.episodes_G) for group in groups)
        num_learnt = sum(len(weighed) for weighed in weighed_P)
        metrics = {
            "episodes/excluded": float(num_episodes - num_learnt),
            "groups/flat": fmean(self.is_flat(group) for group in groups),
            "advantage/abs_mean": _mean_abs_advantage(weighed_P),
        }
        if totals:
            metrics["return/mean"] = fmean(totals)
        if self.baseline is not None:
            metrics["advantage/baseline"] = self.baseline
        metrics |= self._estimator.metrics(
            [
                [each.total for each in self._ledger.earned_by_group(group) if each is not None]
                for group in groups
            ]
        )
        greedy = [g.greedy.reward.value for g in groups if g.greedy and g.greedy.reward]
        if greedy:
            metrics["reward/greedy_mean"] = fmean(greedy)
        return metrics


def _whitened(weighed_P: Sequence[Sequence[Weighed]]) -> list[list[Weighed]]:
    flat = [each for weighed in weighed_P for each in weighed]
    whitened = iter(whiten([each.advantages_M.tolist() for each in flat]))
    return [
        [
            replace(each, advantages_M=torch.tensor(next(whitened), dtype=torch.float32))
            for each in weighed
        ]
        for weighed in weighed_P
    ]


def _mean_abs_advantage(weighed_P: Sequence[Sequence[Weighed]]) -> float:
    advantages = [each.advantages_M for weighed in weighed_P for each in weighed]
    return torch.cat(advantages).abs().mean().item() if advantages else 0.0

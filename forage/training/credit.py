"""From the scored groups of a step to an advantage for every sampled token, as the settings say.

Stands between the rollout and the trainer: it reads rewards and turns, and what the models said of
the episodes (``views.py``), and fills in advantages and the critic's targets. The formulas are
``algorithms``'s; the one thing kept from step to step is the running baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from forage.algorithms.credit.advantages import (
    advantages_over,
    grpo_advantages,
    next_baseline,
    rloo_advantages,
    whiten,
)
from forage.algorithms.credit.gae import discounted_returns, gae
from forage.algorithms.credit.turn_credit import (
    at_turn_ends,
    over_tokens,
    turn_level_advantages,
)
from forage.algorithms.dynamic_sampling import is_flat
from forage.algorithms.loss.kl import kl_estimate
from forage.algorithms.packing import unweighed
from forage.algorithms.pass_at_k import pass_at_k, pass_at_k_advantages
from forage.batch import Weighed
from forage.config.algorithm_config import AlgorithmConfig
from forage.training.earnings import Earned, Ledger
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
        kl_coefficient = kl_coefficient if self._algorithm.kl.place == "reward" else 0.0
        weighed_P: list[list[Weighed]] = []
        totals: list[float] = []
        for group, views in zip(groups, views_P, strict=True):
            earned_G = self._ledger.earned_by_group(group)
            kept = [earned for earned in earned_G if earned is not None]
            penalties = [self._kl_penalties(view, kl_coefficient) for view in views]
            weighed_P.append(self._weigh_group(group, kept, penalties, views))
            totals += [earned.total for earned in kept]
        if self._is_whitened:
            weighed_P = _whitened(weighed_P)
        if self._has_running_baseline:
            self.baseline = next_baseline(self.baseline, totals, self._algorithm.baseline_decay)
        return weighed_P, self._metrics(groups, weighed_P, totals)

    def _kl_penalties(self, view: Weighed, kl_coefficient: float) -> list[float]:
        """What the leash takes off the reward, a token each."""
        if not kl_coefficient:
            return [0.0] * len(view.old_logprobs_M)
        kl_M = kl_estimate(
            view.old_logprobs_M.double(),
            view.reference_logprobs_M.double(),
            self._algorithm.kl.form,
        )
        return (kl_coefficient * kl_M).tolist()

    # From what was earned to advantages.

    def _weigh_group(
        self,
        group: Group,
        earned: Sequence[Earned],
        penalties: Sequence[Sequence[float]],
        views: Sequence[Weighed],
    ) -> list[Weighed]:
        match self._algorithm.advantage:
            case "gae":
                return [self._gae(*each) for each in zip(earned, penalties, views, strict=True)]
            case "turn_level":
                advantages = self._turn_level(earned, penalties)
            case "reinforce_plus_plus":
                advantages = self._reinforce_plus_plus(earned, penalties)
            case _:
                rewards = [
                    each.total - sum(taken) for each, taken in zip(earned, penalties, strict=True)
                ]
                each_advantage = self._of_episodes(rewards, group)
                advantages = [
                    [advantage] * len(view.old_logprobs_M)
                    for advantage, view in zip(each_advantage, views, strict=True)
                    if advantage is not None
                ]
                if len(advantages) != len(views):
                    return []  # the group's baseline could not be had
        return [
            replace(view, advantages_M=torch.tensor(advantages_M, dtype=torch.float32))
            for view, advantages_M in zip(views, advantages, strict=True)
        ]

    def _of_episodes(self, rewards_G: Sequence[float], group: Group) -> tuple[float | None, ...]:
        """One advantage an episode, all None where there is no baseline to compare with."""
        algorithm = self._algorithm
        match algorithm.advantage:
            case "grpo":
                return grpo_advantages(rewards_G, algorithm.normalise_by_std)
            case "dr_grpo":
                return grpo_advantages(rewards_G, normalise_by_std=False)
            case "rloo":
                return rloo_advantages(rewards_G)
            case "pass_at_k":
                return pass_at_k_advantages(rewards_G, algorithm.pass_k)
            case "remax":
                return advantages_over(rewards_G, self._greedy_reward(group))
            case "reinforce" if algorithm.baseline == "group":
                return grpo_advantages(rewards_G, normalise_by_std=False)
            case "reinforce" if algorithm.baseline == "running":
                return advantages_over(rewards_G, self._running_baseline(rewards_G))
            case "reinforce":
                return advantages_over(rewards_G, 0.0)
            case other:
                raise AssertionError(f"{other} tells the tokens of an episode apart")

    def _turn_level(
        self, earned: Sequence[Earned], penalties: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        rewards_GT: list[list[float]] = []
        for each, taken_M in zip(earned, penalties, strict=True):
            ends = [sum(each.lengths_T[: i + 1]) for i in range(len(each.lengths_T))]
            rewards_GT.append(
                [
                    reward - sum(taken_M[end - length : end])
                    for reward, length, end in zip(
                        each.rewards_T, each.lengths_T, ends, strict=True
                    )
                ]
            )
        algorithm = self._algorithm
        by_turn = turn_level_advantages(
            rewards_GT, algorithm.turns.discount, algorithm.normalise_by_std
        )
        return [
            over_tokens(advantages_T, each.lengths_T)
            for advantages_T, each in zip(by_turn, earned, strict=True)
            if advantages_T is not None
        ]

    def _reinforce_plus_plus(
        self, earned: Sequence[Earned], penalties: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        totals = [each.total for each in earned]
        baseline = 0.0
        if self._algorithm.baseline == "group":
            baseline = fmean(totals) if totals else 0.0
        elif self._algorithm.baseline == "running":
            baseline = self._running_baseline(totals)
        advantages: list[list[float]] = []
        for each, taken_M in zip(earned, penalties, strict=True):
            returns_M = discounted_returns(_token_rewards(each, taken_M), self._algorithm.discount)
            advantages.append([value - baseline for value in returns_M])
        return advantages

    def _gae(self, earned: Earned, taken_M: Sequence[float], view: Weighed) -> Weighed:
        advantages_M, returns_M = gae(
            _token_rewards(earned, taken_M),
            view.values_M.tolist(),
            self._algorithm.discount,
            self._algorithm.gae_lambda,
        )
        return replace(
            view,
            advantages_M=torch.tensor(advantages_M, dtype=torch.float32),
            returns_M=torch.tensor(returns_M, dtype=torch.float32),
        )

    @property
    def _is_whitened(self) -> bool:
        algorithm = self._algorithm
        return algorithm.advantage == "reinforce_plus_plus" or (
            algorithm.advantage == "gae" and algorithm.whiten
        )

    @property
    def _has_running_baseline(self) -> bool:
        algorithm = self._algorithm
        return algorithm.baseline == "running" and algorithm.advantage in (
            "reinforce",
            "reinforce_plus_plus",
        )

    def _running_baseline(self, rewards_G: Sequence[float]) -> float:
        """The baseline of the steps before; in the first step the group's mean stands in."""
        if self.baseline is not None:
            return self.baseline
        return fmean(rewards_G) if rewards_G else 0.0

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
        if self._algorithm.advantage == "pass_at_k":
            metrics |= self._best_of_k(groups)
        greedy = [g.greedy.reward.value for g in groups if g.greedy and g.greedy.reward]
        if greedy:
            metrics["reward/greedy_mean"] = fmean(greedy)
        return metrics

    def _best_of_k(self, groups: Sequence[Group]) -> dict[str, float]:
        k = self._algorithm.pass_k
        totals_P = [
            [e.total for e in self._ledger.earned_by_group(group) if e is not None]
            for group in groups
        ]
        best = [pass_at_k(totals, k) for totals in totals_P if len(totals) >= k]
        return {"return/best_of_k": fmean(best)} if best else {}


def _token_rewards(earned: Earned, taken_M: Sequence[float]) -> list[float]:
    rewards_M = at_turn_ends(earned.rewards_T, earned.lengths_T)
    return [reward - taken for reward, taken in zip(rewards_M, taken_M, strict=True)]


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

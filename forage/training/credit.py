"""From the scored groups of a step to an advantage for every sampled token, as the settings say.

Stands between the rollout and the trainer: it decides which episodes may be learnt from, reads
their rewards, turns, and the results of the forward passes (``forward_passes.py``), and fills in
advantages and the critic's targets. The estimator of the settings has the formula; only the running
baseline is kept from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

import torch

from forage.algorithms.credit.estimator import Earned, EarnedByGroup
from forage.algorithms.credit.information_gain import GAINS
from forage.algorithms.credit.reinforce import next_baseline, whiten
from forage.algorithms.credit.turn_credit import TurnRewards, turn_lengths, turn_rewards
from forage.algorithms.dapo import is_flat
from forage.algorithms.packing import uncredited
from forage.batch import Credited
from forage.config.algorithm_config import AlgorithmConfig
from forage.errors import UserError
from forage.rewards.shown import shows_an_answer
from forage.types import ActionKind, Episode, Group, Question, Reward, Status, Turn


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
        self._train_on_failed_searches = train_on_failed_searches

    def is_learnable(self, episode: Episode) -> bool:
        """Whether an episode may enter the loss: nothing around the policy failed it."""
        if episode.status is Status.ENGINE_FAILED or not episode.num_sampled_tokens:
            return False
        if episode.reward is not None and episode.reward.failure is not None:
            return False  # a judge gave no verdict
        return self._train_on_failed_searches or not episode.status.is_failed_call

    def is_flat(self, group: Group) -> bool:
        """Whether the group's episodes earned the same, so that it teaches nothing."""
        return is_flat([earned.total for earned in self._earned_by_group(group)])

    def uncredited(self, groups: Sequence[Group]) -> list[list[Credited]]:
        """The learnable episodes of each group, with nothing known of them yet."""
        return [
            [uncredited(episode) for episode in group.episodes_G if self.is_learnable(episode)]
            for group in groups
        ]

    def credit(
        self, groups: Sequence[Group], views_P: Sequence[Sequence[Credited]], kl_coefficient: float
    ) -> tuple[list[list[Credited]], dict[str, float]]:
        """Advantages, and the critic's targets, of the learnable episodes; and metrics.

        Raises ``FloatingPointError`` where one of these is not finite.
        ``views_P`` are those of ``uncredited``, looked at. The running baseline takes the step in.
        """
        credited_P: list[list[Credited]] = []
        totals: list[float] = []
        totals_P: list[list[float]] = []
        for group, views in zip(groups, views_P, strict=True):
            kept = [
                self._with_gains(earned, view)
                for earned, view in zip(self._earned_by_group(group), views, strict=True)
            ]
            credited_P.append(self._credit_group(group, kept, views, kl_coefficient))
            totals_P.append([earned.total for earned in kept])
            totals += totals_P[-1]
        if self._estimator.is_whitened:
            credited_P = _whitened(credited_P)
        if (factor := self._estimator.step_factor(totals_P)) != 1.0:
            credited_P = [
                [replace(each, advantages_M=factor * each.advantages_M) for each in credited]
                for credited in credited_P
            ]
        _refuse_not_finite(credited_P)
        decay = self._estimator.baseline_decay
        if decay is not None:
            self.baseline = next_baseline(self.baseline, totals, decay)
        return credited_P, self._metrics(groups, credited_P, totals)

    def _credit_group(
        self,
        group: Group,
        earned: Sequence[Earned],
        views: Sequence[Credited],
        kl_coefficient: float,
    ) -> list[Credited]:
        """The episodes of a group with their credit; none where what failed is their baseline."""
        greedy = 0.0
        if self._estimator.plays_greedy:
            assert group.greedy is not None, "the scheduler plays a greedy episode a question"
            if not self.is_learnable(group.greedy):
                return []
            greedy = self._earned_by(group.greedy).total
        members_G = [
            replace(
                each,
                penalties_M=self._kl_penalties(view, kl_coefficient),
                values_M=view.values_M.tolist(),
                columns=view.columns,
            )
            for each, view in zip(earned, views, strict=True)
        ]
        credit = self._estimator.credit(EarnedByGroup(members_G, self.baseline, greedy))
        return [
            replace(
                view,
                advantages_M=torch.tensor(each.advantages_M, dtype=torch.float32),
                returns_M=view.returns_M
                if each.returns_M is None
                else torch.tensor(each.returns_M, dtype=torch.float32),
            )
            for view, each in zip(views, credit, strict=True)
        ]

    def _kl_penalties(self, view: Credited, kl_coefficient: float) -> list[float]:
        """What the leash takes off the reward, a token each."""
        kl = self._algorithm.kl
        if kl is None or kl.place != "reward" or not kl_coefficient:
            return [0.0] * len(view.old_logprobs_M)
        policy_M = view.old_logprobs_M.double()
        kl_M = kl.estimate(policy_M, view.reference_logprobs_M.double(), policy_M)
        return (kl_coefficient * kl_M).tolist()

    def _earned_by_group(self, group: Group) -> list[Earned]:
        """What each learnable member earned."""
        return [self._earned_by(each) for each in group.episodes_G if self.is_learnable(each)]

    def _earned_by(self, episode: Episode) -> Earned:
        """What a scored episode earned: all in one where its tokens are not told apart."""
        assert episode.reward is not None, "the scheduler scores every episode"
        lengths_T = turn_lengths(episode.segments)
        overlong = self._algorithm.overlong
        penalty = overlong.penalty_for(episode.num_sampled_tokens) if overlong else 0.0
        outcome = episode.reward.value - penalty
        turns = self._estimator
        if not isinstance(turns, TurnRewards):
            return Earned((outcome,), (sum(lengths_T),), parts_K=self._parts(episode.reward))
        assert len(lengths_T) == len(episode.turns), "a turn is one stretch of sampled tokens"
        rewards_T = turn_rewards(
            outcome,
            # A search that the last, forced turn refused was not run: nothing was observed.
            [turn.kind is ActionKind.SEARCH and bool(turn.observation) for turn in episode.turns],
            [_surfaces_gold(turn, episode.question) for turn in episode.turns],
            turns.retrieval_bonus,
            turns.search_cost,
        )
        return Earned(tuple(rewards_T), tuple(lengths_T))

    def _parts(self, reward: Reward) -> tuple[float, ...]:
        """The parts that the estimator reads; raises ``UserError`` for one that is not recorded."""
        names = self._estimator.reads_parts
        if unknown := [name for name in names if name not in reward.parts]:
            raise UserError(
                f"algorithm.advantage.parts names {', '.join(unknown)}, which this reward does not "
                f"have; its parts are {', '.join(reward.parts)}"
            )
        return tuple(reward.parts[name] for name in names)

    def _with_gains(self, earned: Earned, view: Credited) -> Earned:
        """What was earned plus the information gain of each turn, if that is a reward."""
        if GAINS not in view.extra:
            return earned
        gained = zip(earned.rewards_T, view.extra[GAINS].tolist(), strict=True)
        return replace(earned, rewards_T=tuple(reward + gain for reward, gain in gained))

    def _metrics(
        self, groups: Sequence[Group], credited_P: list[list[Credited]], totals: Sequence[float]
    ) -> dict[str, float]:
        num_episodes = sum(len(group.episodes_G) for group in groups)
        advantages = [each.advantages_M for credited in credited_P for each in credited]
        mean = torch.cat(advantages).abs().mean().item() if advantages else 0.0
        metrics = {
            "episodes/excluded": float(num_episodes - len(advantages)),
            "advantage/abs_mean": mean,
        }
        if self._estimator.needs_groups:
            metrics["groups/flat"] = fmean(self.is_flat(group) for group in groups)
        if totals:
            metrics["return/mean"] = fmean(totals)
        if self.baseline is not None:
            metrics["advantage/baseline"] = self.baseline
        totals_P = [[each.total for each in self._earned_by_group(group)] for group in groups]
        metrics |= self._estimator.metrics(totals_P)
        greedy = [g.greedy.reward.value for g in groups if g.greedy and g.greedy.reward]
        if greedy:
            metrics["reward/greedy_mean"] = fmean(greedy)
        return metrics


def _refuse_not_finite(credited_P: Sequence[Sequence[Credited]]) -> None:
    """Name the first number that would make the whole step's gradient NaN, and its question."""
    for each in chain.from_iterable(credited_P):
        for what in ("values", "returns", "advantages"):
            if not bool(each.columns[f"{what}_M"].isfinite().all()):
                raise FloatingPointError(
                    f"the {what} of the episode of question {each.episode.question.id!r}, member "
                    f"{each.episode.member}, hold NaN or infinity; nothing was learnt from it. The "
                    "estimator, reference or critic behind them has diverged, or computes in too "
                    "small a type"
                )


def _whitened(credited_P: Sequence[Sequence[Credited]]) -> list[list[Credited]]:
    flat = [each for credited in credited_P for each in credited]
    whitened = iter(whiten([each.advantages_M.tolist() for each in flat]))
    return [
        [
            replace(each, advantages_M=torch.tensor(next(whitened), dtype=torch.float32))
            for each in credited
        ]
        for credited in credited_P
    ]


def _surfaces_gold(turn: Turn, question: Question) -> bool:
    """Whether the turn's search showed a gold passage; where none is known, a golden answer."""
    if question.gold_passage_ids:
        return not set(turn.passage_ids_K).isdisjoint(question.gold_passage_ids)
    return shows_an_answer(turn, question.golden_answers)

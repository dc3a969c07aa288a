"""What each episode earned, turn by turn, before any baseline: reward, turn rewards, penalties.

The first half of credit. It reads what the environment and the rewards wrote down of an episode;
which episodes may be learnt from at all is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

from forage.algorithms.credit.estimator import Earned
from forage.algorithms.credit.turn_credit import TurnRewards, turn_lengths, turn_rewards
from forage.config.algorithm_config import AlgorithmConfig
from forage.rewards.shown import shows_an_answer
from forage.types import ActionKind, Episode, Group, Question, Status, Turn


@dataclass(frozen=True, slots=True)
class Ledger:
    """Says what episodes earned, by the settings."""

    algorithm: AlgorithmConfig
    train_on_failed_searches: bool

    def is_learnable(self, episode: Episode) -> bool:
        """Whether an episode may enter the loss: nothing around the policy failed it."""
        if episode.status is Status.ENGINE_FAILED or not episode.num_sampled_tokens:
            return False
        if episode.reward is not None and episode.reward.failure is not None:
            return False  # a judge gave no verdict
        return self.train_on_failed_searches or not episode.status.is_failed_call

    def earned_by_group(self, group: Group) -> list[Earned | None]:
        """One a member; None for those that are kept out of the loss."""
        return [
            self.earned_by(episode) if self.is_learnable(episode) else None
            for episode in group.episodes_G
        ]

    def earned_by(self, episode: Episode) -> Earned:
        """What a scored episode earned: all in one where its tokens are not told apart."""
        assert episode.reward is not None, "the scheduler scores every episode"
        lengths_T = turn_lengths(episode.segments)
        overlong = self.algorithm.overlong
        penalty = overlong.penalty_for(episode.num_sampled_tokens) if overlong else 0.0
        outcome = episode.reward.value - penalty
        turns = self.algorithm.advantage
        if not isinstance(turns, TurnRewards):
            return Earned((outcome,), (sum(lengths_T),))
        assert len(lengths_T) == len(episode.turns), "a turn is one stretch of sampled tokens"
        rewards_T = turn_rewards(
            outcome,
            [_has_searched(turn) for turn in episode.turns],
            [_surfaces_gold(turn, episode.question) for turn in episode.turns],
            turns.retrieval_bonus,
            turns.search_cost,
        )
        return Earned(tuple(rewards_T), tuple(lengths_T))


def _has_searched(turn: Turn) -> bool:
    """Whether the turn's search was run (one refused by the last, forced turn is not)."""
    return turn.kind is ActionKind.SEARCH and bool(turn.observation)


def _surfaces_gold(turn: Turn, question: Question) -> bool:
    """Whether the turn's search showed a gold passage; where none is known, a golden answer."""
    if question.gold_passage_ids:
        return not set(turn.passage_ids_K).isdisjoint(question.gold_passage_ids)
    return shows_an_answer(turn, question.golden_answers)

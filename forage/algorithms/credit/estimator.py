"""What an estimator of advantages is handed, what it gives back, and what it says of itself.

Each estimator is a file beside this one: its settings, its formula as a pure function, and
``advantages`` or ``credit``, which calls it. ``training/credit.py`` hands it one group at a time.
To add one, copy ``rloo.py`` and add a line to the union in ``config/algorithm_config.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from forage.settings import Frozen


class CriticConfig(Frozen):
    """The value model of PPO: a model of the policy's family with a value head."""

    path: str | None = None
    """The model to start from; null: the policy's starting weights."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """The rate of the critic's own AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which that rate grows from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The weight decay of the critic's AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The norm that the critic's gradient is clipped to."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move in one update; null: freely."""
    num_warmup_steps: int = Field(default=0, ge=0)
    """First steps of the loop in which the critic learns alone."""


@dataclass(frozen=True, slots=True)
class Earned:
    """What an episode earned turn by turn (``_T`` are turns), before any baseline.

    ``_M`` are its sampled tokens: what the leash takes off the reward at each, the critic's value
    before each, where there is a critic, and the energy of each, where the estimator reads it.
    """

    rewards_T: tuple[float, ...]
    lengths_T: tuple[int, ...]
    penalties_M: Sequence[float] = ()
    values_M: Sequence[float] = ()
    energies_M: Sequence[float] = ()
    parts_K: tuple[float, ...] = ()
    """The parts of the reward that the estimator reads."""

    @property
    def total(self) -> float:
        """What the episode earned in all, without the leash."""
        return sum(self.rewards_T)


@dataclass(frozen=True, slots=True)
class EarnedByGroup:
    """The episodes of a group that may be learnt, and the baselines that stand outside of it."""

    members_G: Sequence[Earned]
    running_baseline: float | None = None
    """The mean over the steps before, where the estimator keeps one and this is not the first."""
    greedy_reward: float = 0.0
    """What the greedy episode earned, where the estimator asks for one."""


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """An episode's advantage at each sampled token, and what a critic has to learn there."""

    advantages_M: Sequence[float]
    returns_M: Sequence[float] | None = None


class Estimator(Frozen):
    """The settings of an estimator, and what others must know of it."""

    plays_greedy: ClassVar[bool] = False
    """Whether one more episode of each question is played greedily."""
    reads_energies: ClassVar[bool] = False
    """Whether it asks for the energy of each token, which takes a forward pass."""

    @property
    def needs_groups(self) -> bool:
        """Whether an episode is compared with others of the same question."""
        return True

    @property
    def is_whitened(self) -> bool:
        """Whether the advantages of all tokens of a step get mean 0 and deviation 1."""
        return False

    @property
    def baseline_decay(self) -> float | None:
        """How much of the running baseline a step leaves; None: there is none."""
        return None

    @property
    def reads_parts(self) -> tuple[str, ...]:
        """The parts of the reward that it reads instead of the whole."""
        return ()

    def step_factor(self, totals_P: Sequence[Sequence[float]]) -> float:
        """What multiplies every advantage of a step, from what the members of each group earned."""
        return 1.0

    def credit(self, group: EarnedByGroup) -> list[TokenCredit]:
        """The credit of each member of the group."""
        members_G = group.members_G
        rewards_G = [each.total - sum(each.penalties_M) for each in members_G]
        return [
            TokenCredit([advantage] * sum(each.lengths_T))
            for advantage, each in zip(self.advantages(rewards_G, group), members_G, strict=True)
        ]

    def advantages(self, rewards_G: Sequence[float], group: EarnedByGroup) -> Sequence[float]:
        """One for all tokens of an episode; where they differ, ``credit`` is another.

        ``rewards_G`` is what each episode earned, less what the leash takes off it.
        """
        raise NotImplementedError

    def metrics(self, totals_P: Sequence[Sequence[float]]) -> dict[str, float]:
        """What it measures of a step, from what the members of each group earned."""
        return {}

"""The settings of ``warm_start``: what ``forage sft`` learns from, and how.

docs/warm_starts.md says which of them suit which use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from forage.settings import Frozen, kind_or


class SelectConfig(Frozen):
    """Which recorded episodes are worth learning: those that pass every test below.

    Episodes that a search or the engine failed never pass.
    """

    min_reward: float | None = None
    """The lowest reward that passes; null: any."""
    best_of_group: bool = False
    """Keep a question's highest reward of a step alone, the shortest of equals."""
    max_per_question: int | None = Field(default=None, ge=1)
    """Episodes of a question at most, the best first."""
    deduplicate: bool = True
    """Keep one of several with the same tokens."""
    arms: tuple[str, ...] = ("normal",)
    """The arms of an evaluation that pass; training counts as normal."""


class ScriptedSource(Frozen):
    """Poor demonstrations, written by a script from questions that say how they are solved."""

    kind: Literal["scripted"] = "scripted"
    poor_share: float = Field(default=0.6, ge=0, le=1)
    """The share of demonstrations that search badly."""
    single_passage_share: float = Field(default=0.0, ge=0, le=1)
    """The share that is shown the first passage alone."""
    multi_hop_share: float | None = Field(default=None, ge=0, le=1)
    """The share whose question takes two searches or more; null: as the questions have it."""


class RecordedSource(Frozen):
    """Episodes of a training run or an evaluation."""

    kind: Literal["recorded"] = "recorded"
    episodes: Path | tuple[Path, ...]
    """A file of episodes, or a list of them."""
    select: SelectConfig = SelectConfig()
    """Which of the episodes are learnt."""

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.episodes,) if isinstance(self.episodes, Path) else self.episodes


class ReadingSource(Frozen):
    """Demonstrations of questions that have answers and no hops: search, read, answer."""

    kind: Literal["reading"] = "reading"
    poor_share: float = Field(default=0.2, ge=0, le=1)
    """The share that guesses without a search, or searches for a single word."""
    keyword_share: float = Field(default=0.5, ge=0, le=1)
    """The share of the others that searches for the key words first, not for the question."""


class MuonOptimizer(Frozen):
    """Muon for matrices and AdamW for the rest: for small models from random weights."""

    kind: Literal["muon"] = "muon"
    matrix_learning_rate: float = Field(default=0.02, gt=0)
    """The rate of Muon; warm_start.learning_rate is AdamW's."""


class AdamwOptimizer(Frozen):
    """AdamW alone."""

    kind: Literal["adamw"] = "adamw"


class WarmStartConfig(Frozen):
    """Supervised learning from episodes, before reinforcement learning."""

    source: Annotated[
        ScriptedSource | ReadingSource | RecordedSource,
        Field(discriminator="kind"),
        kind_or("scripted"),
    ] = ScriptedSource()
    """Where the episodes come from."""
    optimizer: Annotated[
        MuonOptimizer | AdamwOptimizer, Field(discriminator="kind"), kind_or("muon")
    ] = MuonOptimizer()
    """What updates the weights."""
    num_steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    sequences_per_step: int = Field(default=64, ge=1)
    """Episodes in a step."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """The rate of AdamW."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which rates grow from 0."""
    observation_weight: float = Field(default=0.1, ge=0)
    """What a token of a search result counts in the loss."""
    argument_weight: float = Field(default=6.0, gt=0)
    """What a token counts that names what was read."""

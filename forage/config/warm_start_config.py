"""The settings of ``warm_start``: what ``forage sft`` learns from, and how.

``run_config.py`` hangs them under its root. docs/warm_starts.md says which of them suit which use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from forage.settings import Settings


class SelectConfig(Settings):
    """Which recorded episodes are worth learning: those that pass every test below.

    ``min_reward`` asks for that reward or more; ``best_of_group`` for the highest one among a
    question's episodes of one step, the shortest of equals; ``max_per_question`` keeps so many of a
    question's best; ``deduplicate`` keeps one of several with the same tokens. ``arms`` are those
    of an evaluation; a training run's episodes count as normal. Episodes that a search or the
    engine failed never pass.
    """

    section = "warm_start.select"
    min_reward: float | None = None
    best_of_group: bool = False
    max_per_question: int | None = Field(default=None, ge=1)
    deduplicate: bool = True
    arms: tuple[str, ...] = ("normal",)


class WarmStartConfig(Settings):
    """Supervised learning from episodes: recorded ones, or poor scripted demonstrations.

    ``optimizer`` ``muon`` updates matrices by Muon at ``matrix_learning_rate`` and the rest by
    AdamW at ``learning_rate``, for small models from random weights. ``adamw`` is AdamW alone.
    """

    section = "warm_start"
    episodes: Path | tuple[Path, ...] | None = None
    select: SelectConfig = SelectConfig()
    poor_share: float = Field(default=0.6, ge=0, le=1)
    single_passage_share: float = Field(default=0.0, ge=0, le=1)
    num_steps: int = Field(default=200, ge=1)
    sequences_per_step: int = Field(default=64, ge=1)
    optimizer: Literal["muon", "adamw"] = "muon"
    learning_rate: float = Field(default=3e-3, gt=0)
    matrix_learning_rate: float = Field(default=0.02, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    observation_weight: float = Field(default=0.1, ge=0)
    argument_weight: float = Field(default=6.0, gt=0)

    @property
    def episode_files(self) -> tuple[Path, ...]:
        """The files of ``episodes``; none where demonstrations are scripted."""
        if self.episodes is None:
            return ()
        return (self.episodes,) if isinstance(self.episodes, Path) else self.episodes

    def dead_keys(self) -> dict[str, str]:
        dead: dict[str, str] = {}
        if self.episode_files:
            remedy = "it is about scripted demonstrations; remove warm_start.episodes"
            dead |= dict.fromkeys(("poor_share", "single_passage_share"), remedy)
        else:
            dead["select"] = "set warm_start.episodes to recorded episodes"
        if self.optimizer == "adamw":
            dead["matrix_learning_rate"] = "set warm_start.optimizer to muon"
        return dead

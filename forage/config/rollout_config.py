"""The settings of ``rollout``: how episodes are sampled."""

from __future__ import annotations

from pydantic import Field

from forage.settings import Frozen


class RolloutConfig(Frozen):
    """Sampling, concurrency and staleness of episodes."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; use 1 to train."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: probability mass of the tokens sampled from; use 1 to train."""
    max_concurrent_episodes: int = Field(default=64, ge=1)
    """Maximum episodes in flight."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum steps an episode may lag behind the trainer; 0: synchronous."""
    episode_deadline_s: float = Field(default=600.0, gt=0)
    """Time limit of an episode, in seconds."""
    num_alternatives: int = Field(default=0, ge=0, le=20)
    """Most likely tokens recorded with each sampled one, for the viewer; 0: none."""
    train_on_failed_searches: bool = False
    """Also learn from episodes in which a search failed."""

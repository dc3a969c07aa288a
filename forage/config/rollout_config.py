"""The settings of ``rollout``: how episodes are sampled."""

from __future__ import annotations

from pydantic import Field

from forage.settings import Frozen


class RolloutConfig(Frozen):
    """How episodes are sampled and how many are in flight."""

    temperature: float = Field(default=1.0, ge=0)
    """The temperature of the sampling; training wants 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples from the likeliest tokens of this mass; training wants 1."""
    max_concurrent_episodes: int = Field(default=64, ge=1)
    """Episodes in flight at most."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps that an episode may lag behind the trainer; 0: synchronous."""
    episode_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds after which an episode is ended."""
    num_alternatives: int = Field(default=0, ge=0, le=20)
    """Likeliest tokens recorded at each sampled one, for the viewer; 0: none."""
    train_on_failed_searches: bool = False
    """Learn from episodes in which a search failed, too."""

"""The settings of ``rollout``: how episodes are sampled, and the slots of the in-process engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forage.settings import Frozen


class EngineConfig(Frozen):
    """The in-process engine: slots with a KV cache, decoded in tiles of a fixed shape."""

    num_slots: int = Field(default=64, ge=1)
    """Episodes that decode at the same time."""
    tile_rows: int = Field(default=32, ge=1)
    """Slots that are decoded in one forward pass of a fixed shape."""
    prefill_bucket: int = Field(default=32, ge=8)
    """Prompts are padded to multiples of so many tokens."""
    max_draft_tokens: int = Field(default=7, ge=0)
    """Tokens that are guessed and checked in one forward pass; 0: none."""
    cache_on_update: Literal["recompute", "keep"] = "recompute"
    """Whether turns in flight go on over keys and values of the new weights or of the old ones."""


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
    engine: EngineConfig = EngineConfig()
    """The in-process engine, which samples unless placement or model names another."""

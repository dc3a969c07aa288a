"""The settings of ``rollout``: how episodes are sampled, and the slots of the in-process engine.

``run_config.py`` hangs them under its root, and refuses the slots where another engine samples.
"""

from __future__ import annotations

from pydantic import Field

from forage.settings import Frozen


class EngineConfig(Frozen):
    """The in-process engine: slots with a KV cache, decoded in tiles of a fixed shape."""

    num_slots: int = Field(default=64, ge=1)
    tile_rows: int = Field(default=32, ge=1)
    prefill_bucket: int = Field(default=32, ge=8)
    max_draft_tokens: int = Field(default=7, ge=0)


class RolloutConfig(Frozen):
    """How episodes are sampled and how many are in flight."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_concurrent_episodes: int = Field(default=64, ge=1)
    max_staleness: int = Field(default=0, ge=0)
    episode_deadline_s: float = Field(default=600.0, gt=0)
    train_on_failed_searches: bool = False
    engine: EngineConfig = EngineConfig()

"""What a Qdrant server is told about a collection, as the manifest keeps it.

The client itself is imported by ``forage.retrieval.vectors.qdrant_collection`` alone.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Distance = Literal["cosine", "dot"]


class QdrantSettings(BaseModel):
    """A server's graph and storage; the defaults are those of the published runs.

    ``m`` edges a point, ``ef_construct`` and ``hnsw_ef`` candidates while building and searching;
    ``on_disk`` memory-maps the vectors; ``quantise`` searches int8 copies held in memory and scores
    the best again from the full vectors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    m: int = Field(default=32, ge=2)
    ef_construct: int = Field(default=512, ge=4)
    hnsw_ef: int = Field(default=256, ge=1)
    on_disk: bool = False
    quantise: bool = False

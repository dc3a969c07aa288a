"""What ``forage serve`` was asked to serve, and the source and pages made from it.

A source holds other sources: each setting below that names one wraps what stands above it. This is
the one place where they are put together; HTTP is ``forage.retrieval.server``'s.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from forage.retrieval.index import open_index
from forage.retrieval.limits import Limits
from forage.retrieval.pages import PageStore, open_pages
from forage.retrieval.source import Source


class ServeSettings(BaseModel):
    """Everything that ``forage serve`` reads from its command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: Path
    pages: Path | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    topk: int = Field(default=3, ge=1)
    workers: int = Field(default=1, ge=1)
    token: SecretStr | None = None
    cache_size: int = Field(default=100_000, ge=0)
    drain_s: float = Field(default=10.0, ge=0)
    limits: Limits = Limits()


def open_source(settings: ServeSettings) -> Source:
    """Open what is to be served; raises ``UserError``."""
    return open_index(settings.index)


def open_page_store(settings: ServeSettings) -> PageStore | None:
    """Open the pages that ``/access`` reads, where there are some; raises ``UserError``."""
    return None if settings.pages is None else open_pages(settings.pages)

"""What ``forage serve`` was asked to serve, and the source and pages made from it.

A source holds other sources: what is named first is opened, and each further setting wraps what
stands above it. This is the one place where they are put together; HTTP is the server's.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from forage.errors import UserError
from forage.retrieval.index import open_index
from forage.retrieval.limits import Limits
from forage.retrieval.pages import PageStore, open_pages
from forage.retrieval.recording import Recorder, Replay
from forage.retrieval.source import Source
from forage.retrieval.web import open_web_source
from forage.retrieval.web_settings import read_web_settings


class ServeSettings(BaseModel):
    """Everything that ``forage serve`` reads from its command line.

    ``source`` is the directory of an index, ``web:PROVIDER`` or ``replay:FILE``; ``web`` holds
    ``key=value`` settings of the provider; ``record`` keeps every answer in a file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    web: tuple[str, ...] = ()
    record: Path | None = None
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
    source = _open_innermost(settings)
    if settings.record is not None:
        try:
            source = Recorder(source, settings.record)
        except UserError:
            source.close()
            raise
    return source


def _open_innermost(settings: ServeSettings) -> Source:
    kind, _, name = settings.source.partition(":")
    if kind == "web" and name:
        return open_web_source(read_web_settings(name, settings.web))
    if settings.web:
        raise UserError(f"--web says how to ask a provider, and {settings.source} is none")
    if kind == "replay" and name:
        return Replay(Path(name))
    return open_index(Path(settings.source))


def open_page_store(settings: ServeSettings) -> PageStore | None:
    """Open the pages that ``/access`` reads, where there are some; raises ``UserError``."""
    return None if settings.pages is None else open_pages(settings.pages)

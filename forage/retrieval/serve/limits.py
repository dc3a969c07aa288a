"""What one request may ask of the service, and how much of it is answered at once."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field


class OverLimit(Exception):
    """A request beyond a limit: the HTTP status and a sentence that names the limit."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class Limits(BaseModel):
    """Each limit is a command-line option; beyond it a request is refused, never cut."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_queries: int = Field(default=1024, ge=1)
    max_topk: int = Field(default=1000, ge=1)
    max_query_chars: int = Field(default=20_000, ge=1)
    max_body_bytes: int = Field(default=16 * 2**20, ge=1)
    max_in_flight: int = Field(default=1024, ge=1)
    deadline_s: float = Field(default=30.0, gt=0)

    def check(self, texts: Sequence[str], name: str, topk: int = 1) -> None:
        """Raise ``OverLimit`` for too many texts, one too long, or too large a ``topk``.

        ``name``: what the texts are called in the request, ``queries`` or ``urls``.
        """
        if len(texts) > self.max_queries:
            raise OverLimit(413, f"{len(texts)} {name} in one request; at most {self.max_queries}")
        if topk > self.max_topk:
            raise OverLimit(400, f"topk is {topk}; at most {self.max_topk}")
        for number, text in enumerate(texts):
            if len(text) > self.max_query_chars:
                raise OverLimit(
                    413,
                    f"{name}[{number}] has {len(text)} characters; at most {self.max_query_chars}",
                )

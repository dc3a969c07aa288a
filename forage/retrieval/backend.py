"""What every search engine behind the service offers: rows and scores for a batch of queries.

A backend knows row numbers only; ``forage.retrieval.index.index`` turns rows into passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Scored:
    """A row of the corpus and how well it answers (higher is better)."""

    row: int
    score: float


class Backend(Protocol):
    """One way of searching a corpus; called from one thread at a time."""

    @property
    def name(self) -> str: ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]:
        """For each query at most ``topk`` rows, best first, ties by the lower row.

        The first k of a search for more than k are the search for k.
        """
        ...

    def __len__(self) -> int:
        """Passages that can be found."""
        ...

    def close(self) -> None:
        """Let go of files, processes and connections; harmless when repeated."""
        ...


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How an index of vectors is opened on this machine; None is what the machine does best.

    ``encoder`` is another place of the same model; ``gpus`` hold the vectors, ``device`` computes
    the encoder, in ``dtype``.
    """

    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    gpus: tuple[int, ...] = ()
    encoder: str | None = None
    trust_remote_code: bool = False

"""Sources with known answers, for the tests of components that combine sources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forage.types import Hit, Passage

Answer = Callable[[str], Sequence[str]]


def passage(identity: str) -> Passage:
    return Passage(identity, f"title of {identity}", f"text of {identity}")


def hits(ids: Sequence[str]) -> list[Hit]:
    """Hits in this order, with meaningless scores that fall from 0."""
    return [Hit(passage(identity), float(-rank)) for rank, identity in enumerate(ids)]


@dataclass
class Listed:
    """Answers a query with the passages whose ids ``answer`` returns."""

    answer: Answer
    name: str = "listed"
    num_passages: int | None = 100
    calls: list[tuple[list[str], int]] = field(default_factory=list)
    is_closed: bool = False

    @property
    def id(self) -> str:
        return f"{self.name}-1"

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.calls.append((list(queries), topk))
        return [hits(self.answer(query))[:topk] for query in queries]

    def close(self) -> None:
        self.is_closed = True

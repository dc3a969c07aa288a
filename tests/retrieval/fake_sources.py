"""Sources whose searches a test delays, breaks or watches."""

import asyncio
import threading
from collections.abc import Sequence

from forage.retrieval.source import SourceError
from forage.types import Hit, Passage


def hits_for(query: str, topk: int) -> list[Hit]:
    """The hits of ``GatedSource``."""
    return [Hit(Passage(f"{query}{row}", "", ""), float(-row)) for row in range(topk)]


class GatedSource:
    """Records its searches; each waits at the gate while it is shut.

    A query containing ``poison`` breaks the search; ``offline`` and ``refused`` make it fail
    temporarily or permanently; ``nan`` and ``short`` make the source return nonsense.
    """

    def __init__(self) -> None:
        self.id = "gated-1"
        self.searches: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.is_closed = False

    @property
    def name(self) -> str:
        return "gated"

    @property
    def num_passages(self) -> int | None:
        return None

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.searches.append((list(queries), topk))
        self.entered.release()
        self.gate.wait()
        joined = " ".join(queries)
        if "poison" in joined:
            raise RuntimeError("the backend broke")
        if "offline" in joined or "refused" in joined:
            raise SourceError("the provider said no", is_temporary="offline" in joined)
        if "nan" in joined:
            return [[Hit(Passage("p", "", ""), float("nan"))] for _ in queries]
        found = [hits_for(query, topk) for query in queries]
        return found[1:] if "short" in joined else found

    def close(self) -> None:
        self.is_closed = True

    async def has_entered(self) -> None:
        """Returns when one more search has begun."""
        await asyncio.to_thread(self.entered.acquire)


async def yield_often() -> None:
    """Runs everything that is ready on the event loop."""
    for _ in range(10):
        await asyncio.sleep(0)

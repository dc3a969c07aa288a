"""A source whose searches are watched: did the last one fail, and are its files whole?

A search that fails in an unexpected way makes the server unready until one succeeds. Where no
client searches any more, because a balancer heard of it, the search that succeeded last is tried
again. A damaged file ends the server: what else is read from it may be wrong without failing.
"""

from __future__ import annotations

from collections.abc import Sequence

from forage.retrieval.index.index_files import DamagedFileError
from forage.retrieval.source import Source, SourceError
from forage.types import Hit


class WatchedSource:
    """The same answers; called from one thread at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tried: tuple[str, int] | None = None
        self.failure: str | None = None
        self.damage: str | None = None

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def id(self) -> str:
        return self._source.id

    @property
    def num_passages(self) -> int | None:
        return self._source.num_passages

    def close(self) -> None:
        self._source.close()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """As the source's; a damaged file is a ``SourceError``."""
        try:
            found = self._source.search(queries, topk)
        except SourceError:  # what it may say: a provider's refusal, a cluster out of reach
            raise
        except DamagedFileError as error:
            self.damage = self.failure = str(error)
            raise SourceError("a file of the index was cut; the server ends") from error
        except Exception as error:  # noted, and raised as it is
            self.failure = f"{type(error).__name__} in a search; the log says more"
            if queries and self._tried is None:
                self._tried = queries[0], topk
            raise
        self.failure = None
        if queries:
            self._tried = queries[0], topk
        return found

    def try_again(self) -> None:
        """Search once more for what was found last (or failed first); raises as ``search``."""
        if self._tried is not None:
            query, topk = self._tried
            self.search([query], topk)

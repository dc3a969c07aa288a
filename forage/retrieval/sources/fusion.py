"""Two or more sources as one: their rankings are joined by reciprocal-rank fusion.

A source that holds sources: an index of words and an index of meanings over one corpus find
different passages, and their scores cannot be compared, but their ranks can. Hits are matched by
the id of their passage. How the parts search is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from hashlib import sha256
from math import fsum

from forage.errors import UserError
from forage.retrieval.source import Source, SourceError
from forage.types import Hit, Passage

# The constant of the paper; it decides how much the first ranks outweigh the later ones.
RRF_K = 60


class Fused:
    """Searches every part, ``depth`` hits deep whatever is asked for, and joins the rankings.

    The depth is fixed so that the first k of a search for more are the search for k. A search finds
    at most the hits of its parts together: between ``depth`` and ``depth`` times their number.
    """

    def __init__(self, sources: Sequence[Source], depth: int = 100, k: int = RRF_K) -> None:
        """``k`` is the constant of the formula; raises ``UserError``. We close the parts."""
        if len(sources) < 2:
            raise UserError(f"{len(sources)} source given; fusion needs two or more")
        if len({id(source) for source in sources}) < len(sources):
            raise UserError("the same source is given twice; fusion needs different ones")
        if depth < 1:
            raise UserError(f"the fusion's depth is {depth}; it must be 1 or more (100 is common)")
        if k < 0:
            raise UserError(f"the fusion's k is {k}; it must be 0 or more ({RRF_K} is common)")
        self.name = "+".join(source.name for source in sources)
        parts = "\n".join([f"rrf {depth} {k}", *(source.id for source in sources)])
        self.id = f"{self.name}-{sha256(parts.encode()).hexdigest()[:16]}"
        # Those of the largest part: the others are expected to hold the same corpus.
        known = [source.num_passages for source in sources if source.num_passages is not None]
        self.num_passages = max(known) if len(known) == len(sources) else None
        self._sources = tuple(sources)
        self._depth, self._k = depth, k
        self._threads = ThreadPoolExecutor(len(sources), thread_name_prefix="fusion")

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The parts search at the same time; raises the ``SourceError`` of the first that failed.

        A part that fails fails the search: half of a fusion would be another ranking.
        """
        searches = [
            self._threads.submit(source.search, queries, self._depth) for source in self._sources
        ]
        wait(searches)  # a part must not be searched again while it still works for us
        found = [search.result() for search in searches]
        self._refuse_other_corpora(found)
        return [
            fuse([by_query[number] for by_query in found], self._k)[:topk]
            for number in range(len(queries))
        ]

    def close(self) -> None:
        self._threads.shutdown()
        for source in self._sources:
            source.close()

    def _refuse_other_corpora(self, found: list[list[list[Hit]]]) -> None:
        """Raise ``SourceError`` where two indexes have different passages under one id.

        Fusing them would add up the ranks of passages that have nothing to do with each other. On
        the web one page has many snippets, so sources without a corpus are not compared.
        """
        seen: dict[str, tuple[Passage, Source]] = {}
        for source, by_query in zip(self._sources, found, strict=True):
            if source.num_passages is None:
                continue
            for hit in (hit for hits in by_query for hit in hits):
                passage, owner = seen.setdefault(hit.passage.id, (hit.passage, source))
                if owner is not source and passage != hit.passage:
                    raise SourceError(
                        f"{owner.name} and {source.name} have different passages with the id "
                        f"{passage.id!r}; fuse indexes of the same corpus",
                        is_temporary=False,
                    )


def fuse(rankings: Sequence[Sequence[Hit]], k: int = RRF_K) -> list[Hit]:
    """Reciprocal-rank fusion: a passage's score is the sum of 1 / (k + rank) over the rankings.

    Ranks count from 1, and in each ranking a passage counts where it stands first. Ties keep the
    order of first appearance, the first ranking before the second. Cormack, Clarke and Buettcher
    2009, https://cormack.uwaterloo.ca/cormacksigir09-rrf.pdf.
    With k = 60, ``[a, b]`` and ``[b, c]`` give b (1/62 + 1/61), a (1/61), c (1/62).
    """
    passages: dict[str, Passage] = {}
    shares: dict[str, list[float]] = {}
    for hits in rankings:
        ranked: dict[str, Hit] = {}
        for hit in hits:
            ranked.setdefault(hit.passage.id, hit)
        for rank, (identity, hit) in enumerate(ranked.items(), start=1):
            passages.setdefault(identity, hit.passage)
            shares.setdefault(identity, []).append(1 / (k + rank))
    # fsum: the sum, and so a tie, must not depend on the order of the rankings.
    fused = [Hit(passages[identity], fsum(parts)) for identity, parts in shares.items()]
    return sorted(fused, key=lambda hit: -hit.score)

"""A Qdrant collection: embedded in this process (a directory), or on a server, spoken to by gRPC.

It holds one point a row of the corpus, its id the row, with a vector and nothing else: passages
stay in the index's own store. The embedded mode compares with every vector (exact, for tens of
thousands of passages); a server has a graph, and its settings are ``QdrantSettings``. This file
wraps the client; ``forage.retrieval.vectors.qdrant`` builds and searches with it.
"""

from __future__ import annotations

import logging
import os
import pickle
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field

from forage.errors import UserError
from forage.retrieval.backend import Scored
from forage.retrieval.source import SourceError
from forage.retrieval.store.manifest import Count
from forage.retrieval.vectors.qdrant_files import refuse_foreign
from forage.settings import Strict

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "QDRANT_API_KEY"
GRPC_PORT = 6334

_MAX_TRIES = 6
_TEMPORARY = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL"}
_QUERIES_PER_REQUEST = 64
# With quantised vectors, as many candidates are scored again from the full ones however few are
# asked for: the first k of a search for more (up to this) are the search for k.
_NUM_RESCORED = 100
# A segment of millions of points gets its graph in one step, which takes hours.
_STALL_S = 6 * 3600.0
# Qdrant's own default: segments below this size are searched without a graph.
_INDEXING_THRESHOLD_KB = 10_000

Distance = Literal["cosine", "dot"]
T = TypeVar("T")


class QdrantSettings(Strict):
    """A server's graph and storage; the defaults are those of the published runs."""

    m: Count = Field(default=32, ge=2, description="edges of each point in the graph")
    ef_construct: Count = Field(
        default=512, ge=4, description="candidates looked at for each point while building"
    )
    hnsw_ef: Count = Field(default=256, ge=1, description="candidates looked at in a search")
    on_disk: bool = Field(default=False, description="memory-map the vectors")
    quantise: bool = Field(
        default=False, description="search int8 copies in memory, score the best again exactly"
    )


class QdrantCollection:
    """A collection of vectors, in a directory or on a server."""

    def __init__(
        self,
        where: Path | str,
        name: str,
        dimension: int,
        distance: Distance = "cosine",
        settings: QdrantSettings | None = None,
        timeout_s: int = 60,
        retry_delay_s: float = 0.5,
    ) -> None:
        """``where`` is a directory, or the URL of a server's gRPC port; raises ``UserError``.

        ``settings`` are a server's alone (None: the published ones). The first retry of a build
        waits ``retry_delay_s``, each further one twice as long. A key is taken from
        ``QDRANT_API_KEY``.
        """
        from qdrant_client import models

        if isinstance(where, Path) and settings is not None:
            raise UserError(
                "m, ef_construct, hnsw_ef, on_disk and quantise do nothing in Qdrant's embedded "
                "mode, which compares with every vector; leave them out, or name a server's URL"
            )
        self._where, self._name = where, name
        self._dimension = dimension
        self._distance = models.Distance(distance.capitalize())
        self._settings = settings or QdrantSettings()
        self._retry_delay_s = retry_delay_s
        if isinstance(where, Path):
            refuse_foreign(where, name)
        self._client = _connect(where, timeout_s)

    @property
    def is_embedded(self) -> bool:
        return isinstance(self._where, Path)

    def exists(self) -> bool:
        """Whether the collection is there; raises ``UserError`` where the server is not."""
        return self._try(lambda: self._client.collection_exists(self._name))

    def create_or_resume(self) -> int:
        """Make the collection where it is missing; the number of points that it holds already.

        A new one makes no graph until ``finish``: one made of growing parts is made many times.
        """
        from qdrant_client import models

        if not self.exists():
            settings = self._settings
            scalar = models.ScalarQuantizationConfig(
                type=models.ScalarType.INT8, quantile=0.99, always_ram=True
            )
            self._try(
                lambda: self._client.create_collection(
                    self._name,
                    vectors_config=models.VectorParams(
                        size=self._dimension,
                        distance=self._distance,
                        on_disk=settings.on_disk,
                    ),
                    hnsw_config=models.HnswConfigDiff(
                        m=settings.m, ef_construct=settings.ef_construct
                    ),
                    optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
                    quantization_config=(
                        models.ScalarQuantization(scalar=scalar) if settings.quantise else None
                    ),
                )
            )
        self.check()
        if self.is_embedded:
            _defer_syncs(self._client, self._name)
        return self.count()

    def check(self) -> None:
        """Raise ``UserError`` unless the collection is there with our dimension and distance."""
        if not self.exists():
            raise UserError(
                f"{self._where} has no Qdrant collection {self._name!r}; build the index again"
            )
        found: Any = self._try(lambda: self._client.get_collection(self._name))
        vectors = found.config.params.vectors
        expected = (self._dimension, self._distance)
        actual = (getattr(vectors, "size", None), getattr(vectors, "distance", None))
        if actual != expected:
            raise UserError(
                f"the Qdrant collection {self._name!r} at {self._where} has vectors of "
                f"{actual[0]} numbers ({actual[1]}), but the index says {expected[0]} "
                f"({expected[1].value}); build the index again"
            )

    def count(self) -> int:
        """Points in the collection, exactly."""
        return self._try(lambda: self._client.count(self._name, exact=True)).count

    def has_rows(self, start: int, stop: int) -> bool:
        """Whether every row from ``start`` to before ``stop`` has its point."""
        found = self._try(
            lambda: self._client.retrieve(
                self._name, range(start, stop), with_payload=False, with_vectors=False
            )
        )
        return len(found) == stop - start

    def add(self, start: int, vectors_BD: np.ndarray) -> None:
        """Store the vectors of the rows from ``start`` on, in place of what those rows had."""
        from qdrant_client import models

        assert vectors_BD.shape[1] == self._dimension, f"vectors of {vectors_BD.shape[1]} numbers"
        rows: list[Any] = list(range(start, start + len(vectors_BD)))
        batch = models.Batch(ids=rows, vectors=vectors_BD.tolist())
        self._try(lambda: self._client.upsert(self._name, batch, wait=True))

    def finish(self, num_rows: int, poll_s: float = 1.0, stall_s: float = _STALL_S) -> None:
        """Check the number of points, then let the server make its graph and wait for it.

        Raises ``UserError`` where it has no graph, or does not get on with it for ``stall_s``.
        """
        from qdrant_client import models

        found = self.count()
        if found != num_rows:
            raise UserError(
                f"the Qdrant collection {self._name!r} at {self._where} holds {found} points, but "
                f"the corpus {num_rows} passages; delete the collection and build again"
            )
        if isinstance(self._where, Path):
            return
        self._ask_for_graph()
        last, since = None, time.monotonic()
        while True:
            state = self._try(lambda: self._client.get_collection(self._name))
            if state.status == models.CollectionStatus.GREEN:
                return
            if state.status == models.CollectionStatus.RED:
                raise UserError(f"Qdrant could not index {self._name!r}: {state.optimizer_status}")
            if state.status == models.CollectionStatus.GREY:
                self._ask_for_graph()  # a server that was started again waits for this
            now = (state.status, state.indexed_vectors_count, state.segments_count)
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > stall_s:
                raise UserError(
                    f"Qdrant at {self._where} has not got on with the graph of {self._name!r} for "
                    f"{stall_s / 3600:.1f} h ({state.status.value}, {state.indexed_vectors_count} "
                    f"of {num_rows} points); look at its log, then run the command again: it goes "
                    "on where it stopped"
                )
            time.sleep(poll_s)

    def _ask_for_graph(self) -> None:
        from qdrant_client import models

        threshold = models.OptimizersConfigDiff(indexing_threshold=_INDEXING_THRESHOLD_KB)
        self._try(lambda: self._client.update_collection(self._name, optimizers_config=threshold))

    def search(self, vectors_BD: np.ndarray, topk: int) -> list[list[Scored]]:
        """For each query its best rows, ties by the lower row; raises ``SourceError``."""
        from qdrant_client import models

        params, limit = None, topk
        if not self.is_embedded:
            quantisation = None
            if self._settings.quantise:
                limit = max(topk, _NUM_RESCORED)
                quantisation = models.QuantizationSearchParams(rescore=True)
            params = models.SearchParams(
                hnsw_ef=max(self._settings.hnsw_ef, limit), quantization=quantisation
            )
        found: list[list[Scored]] = []
        for first in range(0, len(vectors_BD), _QUERIES_PER_REQUEST):
            requests = [
                models.QueryRequest(query=vector.tolist(), limit=limit, params=params)
                for vector in vectors_BD[first : first + _QUERIES_PER_REQUEST]
            ]
            try:
                replies = self._client.query_batch_points(self._name, requests)
            except _errors() as error:
                raise SourceError(f"Qdrant could not search: {_reason(error)}") from error
            found += [_best(reply.points, topk) for reply in replies]
        return found

    def close(self) -> None:
        self._client.close()

    def _try(self, call: Callable[[], T]) -> T:
        """Call the server, again while it is away or busy; then ``UserError``."""
        delay_s = self._retry_delay_s
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                return call()
            except _errors() as error:
                if not _is_temporary(error) or not tries_left:
                    raise UserError(
                        f"Qdrant at {self._where} does not do as asked: {_reason(error)}; check "
                        f"the URL (the gRPC port, {GRPC_PORT} unless changed, not the REST port) "
                        f"and {API_KEY_VARIABLE}, then run the command again: it goes on where it "
                        "stopped"
                    ) from error
                logger.warning("Qdrant: %s; trying again in %g s", _reason(error), delay_s)
            time.sleep(delay_s)
            delay_s *= 2
        raise AssertionError("the last try returns or raises")


def require_qdrant(url: str | None) -> None:
    """Raise where the client is not installed or the server is not there: before hours of work."""
    from qdrant_client import QdrantClient  # noqa: F401 # is it installed?

    if url is not None:
        collection = QdrantCollection(url, "forage", dimension=1)
        try:
            collection.exists()
        finally:
            collection.close()


def _connect(where: Path | str, timeout_s: int) -> Any:
    from qdrant_client import QdrantClient

    if isinstance(where, Path):
        try:
            # A service opens on one thread and searches on another, one at a time.
            return QdrantClient(path=str(where), force_disable_check_same_thread=True)
        except RuntimeError as error:
            raise UserError(f"{where} is in use by another process; end that one first") from error
        except (OSError, ValueError, sqlite3.Error, pickle.UnpicklingError, EOFError) as error:
            raise UserError(f"{where} cannot be read ({error}); build the index again") from error
    try:
        return QdrantClient(
            url=where,
            port=GRPC_PORT,
            grpc_port=_port(where),
            prefer_grpc=True,
            api_key=os.environ.get(API_KEY_VARIABLE),
            timeout=timeout_s,
            check_compatibility=False,  # it would ask the REST port
        )
    except ValueError as error:
        raise UserError(f"{where!r} is not the URL of a Qdrant server: {error}") from error


def _defer_syncs(client: Any, name: str) -> None:
    """Let the system choose when points reach the disk: the client waits for it point by point.

    That is a dozen points a second on a busy disk. A killed build loses nothing by it; one that
    loses its power has to begin again.
    """
    # There is no public way; a client that has moved its database is slow again, and nothing else.
    local = getattr(client, "_client", None)
    collection = getattr(local, "collections", {}).get(name)
    database = getattr(getattr(collection, "storage", None), "storage", None)
    if isinstance(database, sqlite3.Connection):
        database.execute("PRAGMA synchronous=OFF")


def _port(url: str) -> int:
    """The port that ``url`` names; Qdrant's usual one for gRPC where it names none."""
    try:
        return urlsplit(url if "//" in url else f"//{url}").port or GRPC_PORT
    except ValueError as error:
        raise UserError(f"{url!r} is not the URL of a Qdrant server: {error}") from error


def _errors() -> tuple[type[Exception], ...]:
    """What the client raises when the server is away, busy or unwilling."""
    from qdrant_client.common.client_exceptions import QdrantException
    from qdrant_client.connection import grpc  # type: ignore[attr-defined] # gRPC is the client's

    return (grpc.RpcError, QdrantException)


def _is_temporary(error: Exception) -> bool:
    if not hasattr(error, "code"):
        return True  # the client's own error for a rate limit
    return error.code().name in _TEMPORARY  # type: ignore[attr-defined] # a gRPC call's status


def _reason(error: Exception) -> str:
    if not hasattr(error, "code"):
        return str(error)
    return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined] # as above


def _best(points: Sequence[Any], topk: int) -> list[Scored]:
    scored = [Scored(int(point.id), float(point.score)) for point in points]
    return sorted(scored, key=lambda found: (-found.score, found.row))[:topk]

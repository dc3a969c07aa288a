"""An index too large for one machine: shards as deployments of Ray Serve, searched as one source.

``start_shards`` leaves an application on a Ray cluster: a process a shard, each with an opened
index, and one that asks them all and merges by score. ``Sharded`` is the source that a search
server puts in front of it (HTTP, batching and caches are the server's). A shard that does not
answer fails the search: a part of a corpus would be another corpus. Shards are made in
``forage.retrieval.index.shards``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from forage.errors import UserError
from forage.remote.ray_login import join_ray
from forage.retrieval.index.index import OpenOptions, open_index
from forage.retrieval.index.shards import ShardInfo, check_shards, describe_shard, merge
from forage.retrieval.source import SourceError
from forage.types import Hit

APP_NAME = "forage"

# What a pinned shard takes of its custom resource: a machine that has 1 of it holds many shards.
_PIN = 0.001


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """A shard's index directory, as the machine that runs it sees it.

    ``resource`` is a custom resource of Ray that only machines with this directory have; None where
    all machines see it.
    """

    directory: Path
    resource: str | None = None


def start_shards(
    places: Sequence[ShardPlace],
    app: str = APP_NAME,
    address: str | None = "auto",
    options: OpenOptions | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    replicas: int = 1,
) -> None:
    """Run the shards on the Ray cluster at ``address`` and return when all are open.

    They go on until ``stop_shards``. ``num_cpus`` and ``num_gpus`` are what each takes;
    ``replicas`` copies of each share the load. Raises ``UserError`` where Ray is not there or a
    shard does not open.
    """
    if not places:
        raise UserError("no shard given; name the index directories")
    from ray import serve

    with _connected(address):
        if app in serve.status().applications:
            raise UserError(f"the application {app!r} runs already; stop it, or name another")
        _require_resources(places, num_cpus * replicas, num_gpus * replicas, replicas)
        # No proxy: requests come over a search server of ours, whose port is its own.
        serve.start(proxy_location="Disabled")
        shards = [
            serve.deployment(
                name=f"shard-{number}",
                num_replicas=replicas,
                max_ongoing_requests=1,  # an index is searched by one thread at a time
                max_constructor_retry_count=1,
                ray_actor_options={
                    "num_cpus": num_cpus,
                    "num_gpus": num_gpus,
                    "resources": {place.resource: _PIN} if place.resource else {},
                },
            )(_Shard).bind(place.directory, options)
            for number, place in enumerate(places)
        ]
        together = serve.deployment(ray_actor_options={"num_cpus": 0})(_Together)
        try:
            serve.run(together.bind(*shards), name=app, route_prefix=None)
        except RuntimeError as error:  # what Ray Serve raises where a deployment does not start
            reason = _why_not(serve.status().applications[app]) or str(error)
            serve.delete(app)
            raise UserError(f"the shards did not start: {reason}") from error


def stop_shards(app: str = APP_NAME, address: str | None = "auto") -> None:
    """End the processes of ``start_shards``; harmless when there are none."""
    from ray import serve

    with _connected(address):
        serve.delete(app)


class Sharded:
    """A source over the shards that ``start_shards`` runs."""

    def __init__(
        self, app: str = APP_NAME, address: str | None = "auto", timeout_s: float = 30.0
    ) -> None:
        """``timeout_s`` for an answer; raises ``UserError`` where no shards of one index run."""
        from ray import serve
        from ray.serve.exceptions import RayServeException

        self._timeout_s = timeout_s
        with ExitStack() as stack:
            stack.enter_context(_connected(address))
            try:
                self._app: Any = serve.get_app_handle(app)
                infos: list[ShardInfo] = self._app.describe.remote().result(timeout_s=timeout_s)
            except (RayServeException, TimeoutError) as error:
                raise UserError(
                    f"no shards answer as {app!r} on this Ray cluster ({error}); start them first"
                ) from error
            check_shards(infos)
            self._connection = stack.pop_all()
        self.name = infos[0].name
        self.num_passages = sum(info.num_passages for info in infos)
        digest = sha256("\n".join(info.id for info in infos).encode())
        self.id = f"{self.name}-{len(infos)}-{digest.hexdigest()[:16]}"

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """All shards search all queries at the same time; raises ``SourceError``."""
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import RayServeException

        try:
            return self._app.search.remote(list(queries), topk).result(timeout_s=self._timeout_s)
        except SourceError as error:  # a shard's own, wrapped by Ray
            raise SourceError(error.reason, error.is_temporary) from error
        except TimeoutError as error:
            raise SourceError("the shards did not answer in time") from error
        except (RayActorError, RayServeException) as error:
            raise SourceError("a shard has ended; Ray Serve starts it again") from error

    def close(self) -> None:
        """Leave the cluster; the shards go on."""
        self._connection.close()


class _Shard:
    """One shard in a process of Ray."""

    def __init__(self, directory: Path, options: OpenOptions | None) -> None:
        self._directory = directory
        self._index = open_index(directory, options)

    def describe(self) -> ShardInfo:
        return describe_shard(self._directory, self._index)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return self._index.search(queries, topk)


class _Together:
    """Asks every shard, and merges what they find; the handles are Ray Serve's."""

    def __init__(self, *shards: Any) -> None:
        self._shards = shards

    async def describe(self) -> list[ShardInfo]:
        return await asyncio.gather(*(shard.describe.remote() for shard in self._shards))

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        found = await asyncio.gather(
            *(shard.search.remote(queries, topk) for shard in self._shards)
        )
        return [merge(of_query, topk) for of_query in zip(*found, strict=True)]


def _require_resources(
    places: Sequence[ShardPlace], cpus_per_shard: float, gpus_per_shard: float, replicas: int
) -> None:
    """Raise ``UserError`` where the cluster has not enough free: Ray would wait for ever."""
    import ray

    needed = {"CPU": cpus_per_shard * len(places), "GPU": gpus_per_shard * len(places)}
    for place in places:
        if place.resource:
            needed[place.resource] = needed.get(place.resource, 0) + _PIN * replicas
    free = ray.available_resources()
    for name, amount in needed.items():
        if amount > free.get(name, 0):
            raise UserError(
                f"the shards need {amount:g} of the resource {name}, but the Ray cluster has "
                f"{free.get(name, 0):g} free; add machines, or ask for less for each shard"
            )


def _why_not(application: Any) -> str:
    """The last line of the first deployment's traceback, where Ray Serve kept one."""
    messages = (deployment.message for deployment in application.deployments.values())
    return next((message.strip().splitlines()[-1] for message in messages if message), "")


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Connected to Ray; a connection that was there before is used, and left as it is."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        join_ray(address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        raise UserError(
            f"there is no Ray cluster at {address}; start one with: ray start --head"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()

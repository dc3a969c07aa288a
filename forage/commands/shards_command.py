"""``forage shards``: splits a BM25 index into shards, starts shards on Ray, and stops them.

``forage.retrieval`` defines what a shard is and how shards answer together; ``forage serve
ray:APP`` serves them.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

from forage.commands.arguments import (
    made_of,
)

if TYPE_CHECKING:
    from forage.retrieval.sources.sharded import ShardPlace


def _cut(args: Namespace) -> int:
    from forage.retrieval.index.shards import cut_index, other_shards, shard_places
    from forage.retrieval.store.atomic_directory import refuse_an_index

    others = other_shards(args.out, args.count)
    if not args.overwrite:
        for place in [*shard_places(args.out, args.count), *others]:
            refuse_an_index(place)
    cut_index(args.index, args.out, args.count)
    for other in others:
        if other != args.index.absolute():  # a shard may be split further
            rmtree(other)
    return 0


def _start(args: Namespace) -> int:
    from forage.retrieval.backend import OpenOptions
    from forage.retrieval.sources.sharded import start_shards

    start_shards(
        [_place(text) for text in args.shards],
        app=args.app,
        address=args.ray_address,
        options=made_of(args, OpenOptions),
        num_cpus=args.cpus_each,
        num_gpus=args.gpus_each,
        replicas=args.replicas,
    )
    return 0


def _stop(args: Namespace) -> int:
    from forage.retrieval.sources.sharded import stop_shards

    stop_shards(args.app, args.ray_address)
    return 0


def _place(text: str) -> ShardPlace:
    """Reads ``/data/shard-0@first``, a directory on the machines with the resource ``first``."""
    from forage.retrieval.sources.sharded import ShardPlace

    directory, _, resource = text.partition("@")
    return ShardPlace(Path(directory).absolute(), resource or None)


KINDS = {"cut": _cut, "start": _start, "stop": _stop}

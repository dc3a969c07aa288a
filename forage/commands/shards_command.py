"""``forage shards``: splits a BM25 index into shards, starts shards on Ray, and stops them.

``forage.retrieval`` defines what a shard is and how shards answer together; ``forage serve
ray:APP`` serves them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

from forage.commands.arguments import (
    add_kind,
    add_kinds,
    add_vector_options,
    made_of,
    not_negative,
    positive,
)

if TYPE_CHECKING:
    from forage.retrieval.sources.sharded import ShardPlace


def add_arguments(parser: ArgumentParser) -> None:
    kinds = add_kinds(parser)
    add = add_kind(kinds, "cut", "split a BM25 index into shards", _cut).add_argument
    add("index", type=Path, metavar="DIR", help="the index to split")
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write the shards to")
    add("--count", type=positive, required=True, help="number of shards")
    add("--overwrite", action="store_true", help="replace the shards in --out")
    start = add_kind(kinds, "start", "start shards on a Ray cluster", _start)
    add = start.add_argument
    text = "a shard's index, in order; after @, a Ray resource of the machines that have it"
    add("shards", nargs="+", metavar="DIR[@RESOURCE]", help=text)
    add("--cpus-each", type=not_negative, default=1.0, help="processors per shard")
    add("--gpus-each", type=not_negative, default=0.0, help="GPUs per shard")
    add("--replicas", type=positive, default=1, help="copies of each shard")
    add_vector_options(start.add_argument_group("vector indexes"))
    for parser in (start, add_kind(kinds, "stop", "stop the shards of an application", _stop)):
        parser.add_argument("--app", default="forage", help="name of the shards' application")
        text = "address of the Ray cluster"
        parser.add_argument("--ray-address", default="auto", metavar="HOST:PORT", help=text)


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

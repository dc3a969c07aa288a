"""``forage shards``: cuts an index of words into shards, starts shards on Ray, and stops them.

What a shard is and how shards answer together are ``forage.retrieval``'s; ``forage serve ray:APP``
puts the search service in front of them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from forage.commands.arguments import add_kind, add_kinds, not_negative, positive
from forage.commands.serve_command import add_open_arguments, open_options

if TYPE_CHECKING:
    from forage.retrieval.sources.sharded import ShardPlace

_APP = "forage"


def add_arguments(parser: ArgumentParser) -> None:
    """The three kinds of ``forage shards``."""
    kinds = add_kinds(parser)
    cut = add_kind(kinds, "cut", "an index of words into shards", _cut)
    cut.add_argument("index", type=Path, metavar="DIR", help="the index to cut")
    text = "directory to write the shards to"
    cut.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    cut.add_argument("--count", type=positive, required=True, metavar="N", help="number of shards")
    start = add_kind(kinds, "start", "shards on a Ray cluster", _start)
    text = "a shard's index, in order; behind @ a resource of the machines that have it"
    start.add_argument("shards", nargs="+", metavar="DIR[@RESOURCE]", help=text)
    _add_cluster(start)
    start.add_argument(
        "--cpus-each", type=not_negative, default=1.0, metavar="N", help="processors for each shard"
    )
    start.add_argument(
        "--gpus-each", type=not_negative, default=0.0, metavar="N", help="GPUs for each shard"
    )
    start.add_argument(
        "--replicas", type=positive, default=1, metavar="N", help="copies of each shard"
    )
    add_open_arguments(start.add_argument_group("indexes of vectors"))
    _add_cluster(add_kind(kinds, "stop", "what start has started", _stop))


def _add_cluster(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--app", default=_APP, metavar="NAME", help="name of the shards' application"
    )
    parser.add_argument(
        "--ray-address", default="auto", metavar="HOST:PORT", help="the Ray cluster"
    )


def _cut(args: Namespace) -> int:
    from forage.retrieval.index.shards import cut_index

    cut_index(args.index, args.out, args.count)
    return 0


def _start(args: Namespace) -> int:
    from forage.retrieval.sources.sharded import start_shards

    start_shards(
        [_place(text) for text in args.shards],
        app=args.app,
        address=args.ray_address,
        options=open_options(args),
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
    """``/data/shard-0@first`` is a directory on the machines with the resource ``first``."""
    from forage.retrieval.sources.sharded import ShardPlace

    directory, _, resource = text.partition("@")
    return ShardPlace(Path(directory).absolute(), resource or None)

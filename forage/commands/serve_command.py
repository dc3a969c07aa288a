"""``forage serve``: its arguments, and the settings of the search service that they make.

An argument that nothing would read is an error. Opening and serving are ``forage.retrieval``'s.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forage.commands.arguments import add_address, count, not_negative, positive, seconds
from forage.errors import UserError

if TYPE_CHECKING:
    from forage.retrieval.index.index import OpenOptions
    from forage.retrieval.serve.middleware import Limits
    from forage.retrieval.sources.compose import RerankSettings

_DTYPES = ("float32", "float16", "bfloat16")

# Of forage.retrieval.sources.reranker, which takes seconds to import.
_RERANKER = "cross-encoder/ms-marco-MiniLM-L12-v2"


def add_arguments(parser: ArgumentParser) -> None:
    """Everything ``forage serve`` takes; None stands for "not given"."""
    text = "DIR of an index, lucene:DIR, ray:APP, web:PROVIDER or replay:FILE; several are fused"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=text)
    add_address(parser, 8000)
    text = "a provider's setting, for example num_results=5; repeat for more"
    parser.add_argument("--web", action="append", default=[], metavar="key=value", help=text)
    text = "keep every answer in a file, for replay:FILE"
    parser.add_argument("--record", type=Path, metavar="FILE", help=text)
    text = "pages that /access opens: a jsonl file, or live for those of the web"
    parser.add_argument("--pages", type=Path, metavar="FILE", help=text)
    text = "passages for a request that names no topk"
    parser.add_argument("--topk", type=positive, default=3, help=text)
    _add_service_arguments(parser.add_argument_group("service"))
    add_open_arguments(parser.add_argument_group("an index of vectors"))
    several = parser.add_argument_group("several sources")
    text = "hits taken of each source before they are fused (default 100)"
    several.add_argument("--fuse-depth", type=positive, metavar="N", help=text)
    text = "constant of the reciprocal ranks (default 60)"
    several.add_argument("--fuse-k", type=count, metavar="N", help=text)
    _add_rerank_arguments(parser.add_argument_group("reranking"))
    elsewhere = parser.add_argument_group("lucene:DIR and ray:APP")
    text = "Lucene: how soon repetitions of a word stop counting (default 0.9)"
    elsewhere.add_argument("--k1", type=not_negative, help=text)
    text = "Lucene: how much a passage's length counts (default 0.4)"
    elsewhere.add_argument("--b", type=not_negative, help=text)
    text = "the Ray cluster (default: the one on this machine)"
    elsewhere.add_argument("--ray-address", metavar="HOST:PORT", help=text)


def add_open_arguments(group: _ArgumentGroup) -> None:
    """How indexes of vectors are opened; see ``open_options``."""
    text = "where queries are encoded: cpu, cuda:0 ... (default: a GPU if there is one)"
    group.add_argument("--device", metavar="DEVICE", help=text)
    text = "numbers that the encoder computes in (default: the fastest that stays close)"
    group.add_argument("--dtype", choices=_DTYPES, help=text)
    text = "GPUs that hold the vectors (default: none, they stay on disk and in memory)"
    group.add_argument("--gpus", type=count, nargs="+", default=[], metavar="N", help=text)
    text = "another place of the index's encoder: a directory, or an id of the hub"
    group.add_argument("--encoder", metavar="MODEL", help=text)
    text = "run Python code that comes with the encoder"
    group.add_argument("--trust-remote-code", action="store_true", help=text)


def _add_service_arguments(group: _ArgumentGroup) -> None:
    def add(name: str, kind: Callable[[str], Any], text: str, **how: Any) -> None:
        group.add_argument(name, type=kind, help=text, **how)

    text = "file of the bearer token that requests need (or FORAGE_TOKEN in the environment)"
    add("--token-file", Path, text, metavar="FILE")
    add("--token", str, "the token itself; other users can see it in ps")
    add("--cache-size", count, "passages kept in the cache of results; 0: none", default=100_000)
    add("--max-queries", positive, "queries that one request may hold", default=1024)
    add("--max-topk", positive, "topk that a request may ask for", default=1000)
    add("--max-query-chars", positive, "characters that a query may have", default=20_000)
    add("--max-body-bytes", positive, "bytes that a request may have", default=16 * 2**20)
    text = "requests answered at once; further ones are refused with 429"
    add("--max-in-flight", positive, text, default=1024)
    text = "seconds that a request may take; then it is answered with 504"
    add("--deadline", seconds, text, default=30.0, metavar="S")
    text = "seconds that requests in flight have when the server is stopped"
    add("--drain", seconds, text, default=10.0, metavar="S")


def _add_rerank_arguments(group: _ArgumentGroup) -> None:
    text = f"cross-encoder that orders the passages (without a name: {_RERANKER})"
    group.add_argument("--rerank", nargs="?", const=_RERANKER, metavar="MODEL", help=text)
    text = "passages that it reads for each query (default 10)"
    group.add_argument("--rerank-depth", type=positive, metavar="N", help=text)
    group.add_argument("--rerank-revision", metavar="COMMIT", help="a commit of the hub")
    text = "where it computes (default: a GPU if there is one)"
    group.add_argument("--rerank-device", metavar="DEVICE", help=text)
    text = "numbers that it computes in (default float32)"
    group.add_argument("--rerank-dtype", choices=_DTYPES, help=text)
    text = "pairs of query and passage in a batch (default 32)"
    group.add_argument("--rerank-batch", type=positive, metavar="N", help=text)
    text = "tokens of a pair that it reads (default: the model's limit)"
    group.add_argument("--rerank-max-tokens", type=positive, metavar="N", help=text)
    text = "run Python code that comes with the model"
    group.add_argument("--rerank-trust-remote-code", action="store_true", help=text)


def run(args: Namespace) -> int:
    """Serve until a stop; raises ``UserError``."""
    from forage.remote.bearer_token import read_token
    from forage.retrieval.serve.server import serve
    from forage.retrieval.sources.compose import FusionSettings, LuceneSettings, ServeSettings

    serve(
        ServeSettings(
            sources=tuple(args.sources),
            web=tuple(args.web),
            record=args.record,
            host=args.host,
            port=args.port,
            pages=args.pages,
            topk=args.topk,
            token=read_token(args.token_file, args.token),
            cache_size=args.cache_size,
            drain_s=args.drain,
            limits=_limits(args),
            options=open_options(args),
            fusion=_given(FusionSettings, depth=args.fuse_depth, k=args.fuse_k),
            lucene=_given(LuceneSettings, k1=args.k1, b=args.b),
            ray_address=args.ray_address,
            rerank=_rerank(args),
        )
    )
    return 0


def open_options(args: Namespace) -> OpenOptions:
    """What ``add_open_arguments`` read."""
    from forage.retrieval.index.index import OpenOptions

    return OpenOptions(
        device=args.device,
        dtype=args.dtype,
        gpus=tuple(args.gpus),
        encoder=args.encoder,
        trust_remote_code=args.trust_remote_code,
    )


def _limits(args: Namespace) -> Limits:
    from forage.retrieval.serve.middleware import Limits

    return Limits(
        max_queries=args.max_queries,
        max_topk=args.max_topk,
        max_query_chars=args.max_query_chars,
        max_body_bytes=args.max_body_bytes,
        max_in_flight=args.max_in_flight,
        deadline_s=args.deadline,
    )


def _rerank(args: Namespace) -> RerankSettings | None:
    from forage.retrieval.sources.compose import RerankSettings

    said = {
        "depth": args.rerank_depth,
        "revision": args.rerank_revision,
        "device": args.rerank_device,
        "dtype": args.rerank_dtype,
        "batch_size": args.rerank_batch,
        "max_tokens": args.rerank_max_tokens,
        "trust_remote_code": args.rerank_trust_remote_code or None,
    }
    if args.rerank is not None:
        return _given(RerankSettings, model=args.rerank, **said)
    for name, value in said.items():
        if value is not None:
            option = "batch" if name == "batch_size" else name.replace("_", "-")
            raise UserError(f"--rerank-{option} has no effect without --rerank")
    return None


def _given(kind: type, /, **said: Any) -> Any:
    """The settings that were given, the others at their defaults; None where none was."""
    from pydantic import ValidationError

    given = {name: value for name, value in said.items() if value is not None}
    try:
        return kind(**given) if given else None
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"--{wrong['loc'][0]}: {wrong['msg']}") from error

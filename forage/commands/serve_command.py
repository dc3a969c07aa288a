"""``forage serve``: its arguments, and the settings of the search service that they make.

An argument that nothing would read is an error. Opening and serving are ``forage.retrieval``'s.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
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
    """Everything ``forage serve`` takes; None stands for "not said"."""
    text = "DIR of an index, lucene:DIR, ray:APP, web:PROVIDER or replay:FILE; several are fused"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=text)
    add_address(parser, 8000)
    text = "a provider's setting, for example num_results=5; repeat for more"
    parser.add_argument("--web", action="append", default=[], metavar="key=value", help=text)
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep every answer, to replay")
    text = "pages that /access opens: a jsonl, or live for those of the web"
    parser.add_argument("--pages", type=Path, metavar="FILE", help=text)
    parser.add_argument("--topk", type=positive, default=3, help="when a request names none")
    _add_service_arguments(parser.add_argument_group("service"))
    add_open_arguments(parser.add_argument_group("an index of vectors"))
    several = parser.add_argument_group("several sources")
    several.add_argument("--fuse-depth", type=positive, metavar="N", help="hits of each (100)")
    several.add_argument("--fuse-k", type=count, metavar="N", help="of reciprocal ranks (60)")
    _add_rerank_arguments(parser.add_argument_group("reranking"))
    elsewhere = parser.add_argument_group("lucene:DIR and ray:APP")
    elsewhere.add_argument("--k1", type=not_negative, help="of Lucene's BM25 (0.9)")
    elsewhere.add_argument("--b", type=not_negative, help="of Lucene's BM25 (0.4)")
    elsewhere.add_argument("--ray-address", metavar="HOST:PORT", help="the cluster (this one's)")


def add_open_arguments(group: _ArgumentGroup) -> None:
    """How indexes of vectors are opened; see ``open_options``."""
    group.add_argument("--device", metavar="DEVICE", help="of the encoder: cpu, cuda:0 ...")
    group.add_argument("--dtype", choices=_DTYPES, help="its numbers")
    group.add_argument(
        "--gpus", type=count, nargs="+", default=[], metavar="N", help="that hold the vectors"
    )
    group.add_argument("--encoder", metavar="MODEL", help="another place of the same encoder")
    group.add_argument("--trust-remote-code", action="store_true", help="run the encoder's code")


def _add_service_arguments(group: _ArgumentGroup) -> None:
    group.add_argument("--token-file", type=Path, metavar="FILE", help="or FORAGE_TOKEN")
    group.add_argument("--token", help="as above, but other users can see it in ps")
    group.add_argument("--cache-size", type=count, default=100_000, help="passages; 0: none")
    group.add_argument("--max-queries", type=positive, default=1024, help="in one request")
    group.add_argument("--max-topk", type=positive, default=1000)
    group.add_argument("--max-query-chars", type=positive, default=20_000)
    group.add_argument("--max-body-bytes", type=positive, default=16 * 2**20)
    group.add_argument("--max-in-flight", type=positive, default=1024, help="then 429")
    group.add_argument("--deadline", type=seconds, default=30.0, metavar="S", help="then 504")
    group.add_argument("--drain", type=seconds, default=10.0, metavar="S", help="at a stop")


def _add_rerank_arguments(group: _ArgumentGroup) -> None:
    text = f"a cross-encoder, a directory or an id of the hub ({_RERANKER})"
    group.add_argument("--rerank", nargs="?", const=_RERANKER, metavar="MODEL", help=text)
    group.add_argument("--rerank-depth", type=positive, metavar="N", help="passages it reads (10)")
    group.add_argument("--rerank-revision", metavar="COMMIT")
    group.add_argument("--rerank-device", metavar="DEVICE")
    group.add_argument("--rerank-dtype", choices=_DTYPES, help="(float32)")
    group.add_argument("--rerank-batch", type=positive, metavar="N", help="pairs at once (32)")
    group.add_argument("--rerank-max-tokens", type=positive, metavar="N", help="of a pair")
    group.add_argument("--rerank-trust-remote-code", action="store_true")


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
    """The settings that were said, the others at their defaults; None where nothing was said."""
    from pydantic import ValidationError

    given = {name: value for name, value in said.items() if value is not None}
    try:
        return kind(**given) if given else None
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"--{wrong['loc'][0]}: {wrong['msg']}") from error

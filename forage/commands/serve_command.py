"""``forage serve``: its arguments, and the settings of the search service that they make.

An argument that nothing would read is an error. Opening and serving are ``forage.retrieval``'s.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forage.commands.arguments import (
    DTYPES,
    add_address,
    add_vector_options,
    count,
    made_of,
    not_negative,
    positive,
    seconds,
)
from forage.errors import UserError
from forage.hardware import bound_kernel_caches
from forage.retrieval.cache import CACHE_BYTES

if TYPE_CHECKING:
    from forage.retrieval.sources.compose import RerankSettings

# Of forage.retrieval.sources.reranker, which takes seconds to import.
_RERANKER = "cross-encoder/ms-marco-MiniLM-L12-v2"
# Of forage.retrieval.wire, which imports pydantic.
_WIKIPEDIA_PAGE = "https://en.wikipedia.org/w/index.php?title={title}"


def add_arguments(parser: ArgumentParser) -> None:
    """Everything ``forage serve`` takes; None stands for "not given"."""
    add = parser.add_argument
    text = "DIR of an index, lucene:DIR, ray:APP, web:PROVIDER or replay:FILE; several are fused"
    add("sources", nargs="+", metavar="SOURCE", help=text)
    add_address(parser, 8000)
    text = "a provider's setting, for example num_results=5; repeat for more"
    add("--web", action="append", default=[], metavar="key=value", help=text)
    add("--record", type=Path, help="keep every answer in a file, for replay:FILE")
    text = "pages that /access opens: a jsonl file, or live for those of the web"
    add("--pages", type=Path, help=text)
    text = "read all files of the index and of pages first, and compare them with their checksums"
    add("--verify", action="store_true", help=text)
    add("--topk", type=positive, default=3, help="passages for a request that names no topk")
    text = "address of a title's page, for passages whose line has no url; '': they get none"
    add("--page-url", type=_page_url, default=_WIKIPEDIA_PAGE, metavar="ADDRESS", help=text)
    _add_service_arguments(parser.add_argument_group("service"))
    add_vector_options(parser.add_argument_group("an index of vectors"))
    add = parser.add_argument_group("several sources").add_argument
    text = "hits taken of each source before they are fused (default 100)"
    add("--fuse-depth", type=positive, help=text)
    add("--fuse-k", type=count, help="constant of the reciprocal ranks (default 60)")
    _add_rerank_arguments(parser.add_argument_group("reranking"))
    add = parser.add_argument_group("lucene:DIR and ray:APP").add_argument
    text = "Lucene: how soon repetitions of a word stop counting (default 0.9)"
    add("--k1", type=not_negative, help=text)
    add("--b", type=not_negative, help="Lucene: weight of a passage's length (default 0.4)")
    text = "the Ray cluster (default: the one on this machine)"
    add("--ray-address", metavar="HOST:PORT", help=text)


def _page_url(text: str) -> str:
    """An address with ``{title}`` in it, or nothing."""
    if text and "{title}" not in text:
        raise ArgumentTypeError(f"{text!r} lacks {{title}}, the place of the page's title")
    return text


def _add_service_arguments(group: _ArgumentGroup) -> None:
    def add(name: str, kind: Callable[[str], Any], text: str, **how: Any) -> None:
        group.add_argument(name, type=kind, help=text, **how)

    text = "file of the bearer token that requests need (or FORAGE_TOKEN in the environment)"
    add("--token-file", Path, text)
    add("--token", str, "the token itself; other users can see it in ps")
    text = "serve web:PROVIDER without a token: whoever reaches the server spends money"
    group.add_argument("--no-token", action="store_true", help=text)
    text = "a further name by which clients may call this server; repeat for more"
    group.add_argument(
        "--allow-host", action="append", default=[], dest="allow_hosts", metavar="NAME", help=text
    )
    text = "bytes of memory for the cache of results; 0: none"
    add("--cache-size", count, text, default=CACHE_BYTES)
    text = "queries that one request may hold (default: as many as --max-body-bytes allows)"
    add("--max-queries", positive, text)
    add("--max-topk", positive, "topk that a request may ask for", default=1000)
    add("--max-query-chars", positive, "characters that a query may have", default=20_000)
    add("--max-body-bytes", positive, "bytes that a request may have", default=16 * 2**20)
    text = "bytes of passages or pages that a reply may have; what finds more is refused"
    add("--max-reply-bytes", positive, text, default=64 * 2**20)
    text = "requests answered at once; further ones are refused with 429"
    add("--max-in-flight", positive, text, default=1024)
    add("--max-connections", positive, "connections at once", default=4096)
    text = "seconds that a client has for headers, a body, or taking a part of its reply"
    add("--patience", seconds, text, default=10.0, dest="patience_s")
    text = "seconds that a request may take where its client sets none; then it gets a 504"
    add("--deadline", seconds, text, default=600.0, dest="deadline_s")
    text = "seconds that requests in flight have when the server is stopped"
    add("--drain", seconds, text, default=10.0, dest="drain_s")


def _add_rerank_arguments(group: _ArgumentGroup) -> None:
    add = group.add_argument
    text = f"cross-encoder that orders the passages (without a name: {_RERANKER})"
    add("--rerank", nargs="?", const=_RERANKER, metavar="MODEL", help=text)
    add("--rerank-depth", type=positive, help="passages that it reads of each query (default 10)")
    add("--rerank-revision", metavar="COMMIT", help="a commit of the hub")
    text = "where it computes (default: a GPU if there is one)"
    add("--rerank-device", metavar="DEVICE", help=text)
    add("--rerank-dtype", choices=DTYPES, help="numbers that it computes in (default float32)")
    text = "pairs of query and passage in a batch (default 32)"
    add("--rerank-batch", type=positive, dest="rerank_batch_size", help=text)
    text = "tokens of a pair that it reads (default: the model's limit)"
    add("--rerank-max-tokens", type=positive, help=text)
    text = "run Python code that comes with the model"
    add("--rerank-trust-remote-code", action="store_true", help=text)


def run(args: Namespace) -> int:
    bound_kernel_caches()
    from forage.remote.secret import read_token
    from forage.retrieval.backend import OpenOptions
    from forage.retrieval.serve.limits import Limits
    from forage.retrieval.serve.server import serve
    from forage.retrieval.sources.compose import FusionSettings, LuceneSettings, ServeSettings

    settings = made_of(
        args,
        ServeSettings,
        token=read_token(args.token_file, args.token),
        limits=made_of(args, Limits),
        options=made_of(args, OpenOptions),
        fusion=_given(FusionSettings, depth=args.fuse_depth, k=args.fuse_k),
        lucene=_given(LuceneSettings, k1=args.k1, b=args.b),
        rerank=_rerank(args),
    )
    serve(settings)
    return 0


def _rerank(args: Namespace) -> RerankSettings | None:
    from forage.retrieval.sources.compose import RerankSettings

    values = vars(args).items()
    said = {n.removeprefix("rerank_"): v for n, v in values if n.startswith("rerank_") and v}
    if args.rerank is not None:
        return _given(RerankSettings, model=args.rerank, **said)
    for name in said:
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

"""``forage serve``: turns its arguments into the settings of the search service.

An argument without an effect is an error. Opening and serving are in ``forage.retrieval``.
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

# Copied from forage.retrieval.sources.reranker, which takes seconds to import.
_RERANKER = "cross-encoder/ms-marco-MiniLM-L12-v2"
# Copied from forage.retrieval.wire, which imports pydantic.
_WIKIPEDIA_PAGE = "https://en.wikipedia.org/w/index.php?title={title}"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds all arguments of ``forage serve``; None means "not given"."""
    add = parser.add_argument
    text = "index directory, lucene:DIR, ray:APP, web:PROVIDER or replay:FILE; several are fused"
    add("sources", nargs="+", metavar="SOURCE", help=text)
    add_address(parser, 8000)
    text = "a setting of the web provider, for example num_results=5; may be repeated"
    add("--web", action="append", default=[], metavar="key=value", help=text)
    add("--record", type=Path, help="record every answer in this file, for replay:FILE")
    text = "the index's documents or corpus: when they change, update the index and serve it"
    add("--watch", type=Path, metavar="PATH", help=text)
    text = "pages for /access: a JSON-lines file, or live to fetch them from the web"
    add("--pages", type=Path, help=text)
    text = "first read all files of the index and the pages, and compare them with their checksums"
    add("--verify", action="store_true", help=text)
    add("--topk", type=positive, default=3, help="passages for a request without topk")
    text = "address of a page by its {title}, for passages whose line has no url; '' for none"
    add("--page-url", type=_page_url, default=_WIKIPEDIA_PAGE, metavar="ADDRESS", help=text)
    _add_service_arguments(parser.add_argument_group("service"))
    add_vector_options(parser.add_argument_group("vector indexes"))
    add = parser.add_argument_group("several sources").add_argument
    text = "hits taken from each source before fusion (default 100)"
    add("--fuse-depth", type=positive, help=text)
    add("--fuse-k", type=count, help="constant k of reciprocal-rank fusion (default 60)")
    _add_rerank_arguments(parser.add_argument_group("reranking"))
    add = parser.add_argument_group("lucene:DIR and ray:APP").add_argument
    text = "Lucene: how soon repetitions of a word stop counting (default 0.9)"
    add("--k1", type=not_negative, help=text)
    add("--b", type=not_negative, help="Lucene: weight of a passage's length (default 0.4)")
    text = "address of the Ray cluster (default: the one on this machine)"
    add("--ray-address", metavar="HOST:PORT", help=text)


def _page_url(text: str) -> str:
    """Reads an address that contains ``{title}``, or nothing."""
    if text and "{title}" not in text:
        raise ArgumentTypeError(f"{text!r} must contain {{title}}, where the title goes")
    return text


def _add_service_arguments(group: _ArgumentGroup) -> None:
    def add(name: str, kind: Callable[[str], Any], text: str, **how: Any) -> None:
        group.add_argument(name, type=kind, help=text, **how)

    text = "file with the bearer token that requests need (or FORAGE_TOKEN in the environment)"
    add("--token-file", Path, text)
    add("--token", str, "the token; other users can see it in ps")
    text = "serve web:PROVIDER without a token: everyone who reaches the server spends money"
    group.add_argument("--no-token", action="store_true", help=text)
    text = "an additional host name under which clients may call this server; may be repeated"
    group.add_argument(
        "--allow-host", action="append", default=[], dest="allow_hosts", metavar="NAME", help=text
    )
    text = "bytes of memory for the result cache; 0 turns it off"
    add("--cache-size", count, text, default=CACHE_BYTES)
    text = "maximum queries per request (default: as many as --max-body-bytes allows)"
    add("--max-queries", positive, text)
    add("--max-topk", positive, "maximum topk of a request", default=1000)
    add("--max-query-chars", positive, "maximum characters per query", default=20_000)
    add("--max-body-bytes", positive, "maximum bytes of a request", default=16 * 2**20)
    text = "maximum bytes of passages or pages in a reply; larger replies are refused"
    add("--max-reply-bytes", positive, text, default=64 * 2**20)
    text = "maximum requests in flight; further ones are refused with 429"
    add("--max-in-flight", positive, text, default=1024)
    add("--max-connections", positive, "maximum connections", default=4096)
    text = "seconds a client has to send headers or a body, or to receive a part of its reply"
    add("--patience", seconds, text, default=10.0, dest="patience_s")
    text = "seconds after which a request gets a 504, if its client sets no limit"
    add("--deadline", seconds, text, default=600.0, dest="deadline_s")
    text = "seconds to finish requests in flight when the server is stopped"
    add("--drain", seconds, text, default=10.0, dest="drain_s")


def _add_rerank_arguments(group: _ArgumentGroup) -> None:
    add = group.add_argument
    text = f"cross-encoder that reranks the passages (without a name: {_RERANKER})"
    add("--rerank", nargs="?", const=_RERANKER, metavar="MODEL", help=text)
    add("--rerank-depth", type=positive, help="passages to rerank per query (default 10)")
    add("--rerank-revision", metavar="COMMIT", help="a commit on the hub")
    text = "device of the cross-encoder (default: a GPU if present)"
    add("--rerank-device", metavar="DEVICE", help=text)
    add("--rerank-dtype", choices=DTYPES, help="its compute type (default float32)")
    text = "pairs of query and passage per batch (default 32)"
    add("--rerank-batch", type=positive, dest="rerank_batch_size", help=text)
    text = "maximum tokens of a pair (default: the model's limit)"
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
    given = {n.removeprefix("rerank_"): v for n, v in values if n.startswith("rerank_") and v}
    if args.rerank is not None:
        return _given(RerankSettings, model=args.rerank, **given)
    for name in given:
        option = "batch" if name == "batch_size" else name.replace("_", "-")
        raise UserError(f"--rerank-{option} has no effect without --rerank")
    return None


def _given(kind: type, /, **values: Any) -> Any:
    """The settings with the given values and defaults for the rest; None if none was given."""
    from pydantic import ValidationError

    given = {name: value for name, value in values.items() if value is not None}
    try:
        return kind(**given) if given else None
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"--{wrong['loc'][0]}: {wrong['msg']}") from error

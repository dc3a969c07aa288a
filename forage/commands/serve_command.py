"""``forage serve``: turns its arguments into the settings of the search service.

An argument without an effect is an error. Opening and serving are in ``forage.retrieval``.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from forage.commands.arguments import (
    made_of,
)
from forage.errors import UserError
from forage.hardware import bound_kernel_caches

if TYPE_CHECKING:
    from forage.retrieval.sources.compose import RerankSettings

# As in forage.retrieval.sources.reranker, which takes seconds to import.
_RERANKER = "cross-encoder/ms-marco-MiniLM-L12-v2"
# As in forage.retrieval.wire, which imports pydantic.
_WIKIPEDIA_PAGE = "https://en.wikipedia.org/w/index.php?title={title}"


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

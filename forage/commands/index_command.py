"""``forage index``: its arguments, and what they ask for: an index built, adopted or estimated.

Arguments that the chosen backend does not read are errors that say which backends do. Building
itself is ``forage.retrieval``'s.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forage.commands.arguments import positive
from forage.errors import UserError

if TYPE_CHECKING:
    from forage.retrieval.index.estimate import Estimate
    from forage.retrieval.vectors.encoder import EncoderChoice
    from forage.retrieval.vectors.faiss_settings import FaissSettings

DENSE_BACKENDS = ("flat", "hnsw", "ivf", "sq8", "pq", "ivfpq")

_BM25 = ("k1", "b")
_FAISS = (
    "storage",
    "links",
    "ef_construction",
    "ef_search",
    "lists",
    "probes",
    "code_bytes",
    "rescore",
    "candidates",
)
_ENCODER = (
    "revision",
    "query_model",
    "query_revision",
    "pooling",
    "query_prefix",
    "passage_prefix",
    "passage_template",
    "normalise",
    "max_length",
    "dtype",
    "onnx_file",
)
_QDRANT_SETTINGS = ("m", "ef_construct", "hnsw_ef", "on_disk", "quantise")
_QDRANT = ("qdrant_url", "collection", *_QDRANT_SETTINGS)
_OPTION = {"query_model": "--query-encoder", "onnx_file": "--onnx"}


def add_arguments(parser: ArgumentParser) -> None:
    """Everything ``forage index`` takes; None stands for "not said"."""
    parser.add_argument("--corpus", type=Path, required=True, metavar="FILE", help="jsonl or gz")
    parser.add_argument("--out", type=Path, metavar="DIR", help="not with --estimate")
    parser.add_argument("--backend", choices=["bm25", *DENSE_BACKENDS, "qdrant"])
    parser.add_argument("--estimate", action="store_true", help="say what it would cost, and stop")
    parser.add_argument(
        "--adopt", type=Path, nargs="+", metavar="FAISS", help="an index that exists, or its parts"
    )
    parser.add_argument("--restart", action="store_true", help="forget an unfinished build")
    words = parser.add_argument_group("bm25")
    words.add_argument("--k1", type=float, help="when repeats stop counting (0.9)")
    words.add_argument("--b", type=float, help="how much length counts (0.4)")
    _add_encoder_arguments(parser.add_argument_group("encoder"))
    _add_faiss_arguments(parser.add_argument_group("vectors"))
    _add_qdrant_arguments(parser.add_argument_group("qdrant"))


def _add_encoder_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--encoder", metavar="MODEL", help="a directory or an id of the hub")
    group.add_argument("--revision", metavar="COMMIT")
    group.add_argument("--query-encoder", dest="query_model", metavar="MODEL", help="as in DPR")
    group.add_argument("--query-revision", metavar="COMMIT")
    group.add_argument("--pooling", choices=["mean", "cls", "lasttoken", "max"])
    group.add_argument("--query-prefix", metavar="TEXT")
    group.add_argument("--passage-prefix", metavar="TEXT")
    group.add_argument("--passage-template", metavar="TEXT", help="with {title} and {text}")
    group.add_argument("--normalise", action=argparse.BooleanOptionalAction, help="unit length")
    group.add_argument("--max-length", type=positive, metavar="TOKENS")
    group.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    group.add_argument(
        "--onnx", dest="onnx_file", nargs="?", const="onnx/model.onnx", metavar="FILE"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    group.add_argument("--device", nargs="+", default=[], metavar="DEVICE", help="cuda:0 cuda:1")


def _add_faiss_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--storage", choices=["float32", "float16", "int8"], help="flat, hnsw, ivf")
    group.add_argument("--links", type=positive, metavar="N", help="hnsw: a node's (64)")
    group.add_argument("--ef-construction", type=positive, metavar="N", help="hnsw (200)")
    group.add_argument("--ef-search", type=positive, metavar="N", help="hnsw (128)")
    group.add_argument("--lists", type=positive, metavar="N", help="ivf, ivfpq: about 4 sqrt(N)")
    group.add_argument("--probes", type=positive, metavar="N", help="ivf, ivfpq: lists searched")
    group.add_argument("--code-bytes", type=positive, metavar="N", help="pq, ivfpq: a vector's")
    group.add_argument("--rescore", choices=["float16", "int8", "none"], help="sq8, pq, ivfpq")
    group.add_argument("--candidates", type=positive, metavar="N", help="sq8, pq, ivfpq: rescored")


def _add_qdrant_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--qdrant-url", metavar="URL", help="gRPC port of a server; else embedded")
    group.add_argument("--collection", metavar="NAME", help="its name begins with this (forage)")
    group.add_argument("--m", type=positive, metavar="N", help="edges a point (32)")
    group.add_argument("--ef-construct", type=positive, metavar="N", help="candidates (512)")
    group.add_argument("--hnsw-ef", type=positive, metavar="N", help="when searching (256)")
    group.add_argument("--on-disk", action="store_true", help="vectors are memory-mapped")
    group.add_argument("--quantise", action="store_true", help="int8 in memory, then re-scored")


def run(args: Namespace) -> int:
    """Build, adopt or estimate; raises ``UserError`` for arguments that do not go together."""
    if args.estimate:
        _refuse(args, ("out", *_QDRANT), "--estimate builds nothing, and nothing for Qdrant")
        if args.backend == "qdrant":
            raise UserError("--estimate knows bm25 and FAISS's backends; hnsw is near Qdrant's")
        _print_estimates(args)
        return 0
    if args.out is None:
        raise UserError("the following arguments are required: --out (see: forage index --help)")
    if args.adopt:
        _adopt(args)
    elif args.backend in (None, "bm25"):
        _build_bm25(args)
    elif args.backend == "qdrant":
        _build_qdrant(args)
    else:
        _build_dense(args)
    return 0


def _build_bm25(args: Namespace) -> None:
    others = ("encoder", *_ENCODER, *_FAISS, *_QDRANT, "device", "trust_remote_code", "restart")
    _refuse(args, others, "the backend is bm25")
    from forage.retrieval.index.build import build_index

    k1 = 0.9 if args.k1 is None else args.k1
    b = 0.4 if args.b is None else args.b
    build_index(args.corpus, args.out, k1=k1, b=b, show_progress=True)


def _build_dense(args: Namespace) -> None:
    _refuse(args, (*_BM25, *_QDRANT), f"the backend is {args.backend}")
    from forage.retrieval.index.build import DenseBuild, build_dense_index

    build = DenseBuild(
        encoder=_encoder_choice(args),
        faiss=_faiss_settings(args, args.backend),
        devices=tuple(args.device),
        is_restart=args.restart,
    )
    build_dense_index(args.corpus, args.out, build)


def _build_qdrant(args: Namespace) -> None:
    _refuse(args, (*_BM25, *_FAISS), "the backend is qdrant")
    from pydantic import ValidationError

    from forage.retrieval.index.build import DenseBuild
    from forage.retrieval.vectors.build_qdrant import QdrantPlace, build_qdrant_index
    from forage.retrieval.vectors.faiss_settings import FlatSettings
    from forage.retrieval.vectors.qdrant_settings import QdrantSettings

    given = {n: getattr(args, n) for n in _QDRANT_SETTINGS if getattr(args, n)}
    if args.qdrant_url is None:
        reason = "Qdrant's embedded mode compares with every vector; give --qdrant-url"
        _refuse(args, ("collection", *_QDRANT_SETTINGS), reason)
    try:
        settings = None if args.qdrant_url is None else QdrantSettings(**given)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"{_option(str(wrong['loc'][0]))}: {wrong['msg']}") from error
    build = DenseBuild(
        encoder=_encoder_choice(args),
        faiss=FlatSettings(),
        devices=tuple(args.device),
        is_restart=args.restart,
    )
    place = QdrantPlace(args.qdrant_url, args.collection or "forage", settings)
    build_qdrant_index(args.corpus, args.out, build, place)


def _adopt(args: Namespace) -> None:
    read = ("ef_search", "probes")
    unread = tuple(name for name in _FAISS if name not in read)
    _refuse(
        args, ("backend", "restart", *_BM25, *_QDRANT, *unread), "--adopt takes an index as it is"
    )
    if len(args.device) > 1:
        raise UserError("--adopt encodes a sample only: one --device is enough")
    choice = _encoder_choice(args)
    from forage.retrieval.index.index import missing_extra
    from forage.retrieval.vectors.faiss_settings import AdoptedSettings

    settings = AdoptedSettings(ef_search=args.ef_search, probes=args.probes)
    try:
        from forage.retrieval.index.adopt import adopt_index
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    adopt_index(args.adopt, args.corpus, args.out, choice, settings, *args.device)


def _encoder_choice(args: Namespace) -> EncoderChoice:
    from forage.retrieval.vectors.encoder import EncoderChoice

    if args.encoder is None:
        raise UserError(
            "vectors need an encoder: give --encoder, a directory or an id of the hub "
            "(for example intfloat/e5-base-v2)"
        )
    given = {name: getattr(args, name) for name in _ENCODER}
    return EncoderChoice(args.encoder, **given, trust_remote_code=args.trust_remote_code)


def _faiss_settings(args: Namespace, backend: str) -> FaissSettings:
    """The settings of a backend; raises ``UserError`` for one that it does not read."""
    from forage.retrieval.vectors.faiss_settings import BUILT_KINDS

    given = _given_faiss(args)
    for name in given:
        readers = [kind for kind, model in BUILT_KINDS.items() if name in model.model_fields]
        if backend not in readers:
            raise UserError(
                f"{_option(name)} is for {', '.join(readers)}; the backend is {backend}"
            )
    if backend == "flat" and args.storage == "int8":
        raise UserError("flat is stored in float32 or float16; its int8 form is --backend sq8")
    return _make_settings(backend, given)


def _given_faiss(args: Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in _FAISS if getattr(args, name) is not None}
    if given.get("rescore") == "none":
        given["rescore"] = None
    return given


def _print_estimates(args: Namespace) -> None:
    """A table: one backend where one is named, else all that can be said."""
    from rich.console import Console

    from forage.retrieval.index.estimate import estimate_bm25, look_at_corpus

    if args.backend == "bm25" or (args.backend is None and args.encoder is None):
        unread = ("encoder", *_ENCODER, *_FAISS, "device")
        _refuse(args, unread, "without --encoder only bm25 is estimated")
    look = look_at_corpus(args.corpus)
    estimates = [estimate_bm25(look)] if args.backend in (None, "bm25") else []
    if args.encoder is not None or args.backend not in (None, "bm25"):
        estimates += _dense_estimates(args, look)
    about = "" if look.is_exact else "about "
    title = f"{about}{look.num_passages:,} passages, {about}{_size(look.num_bytes)} of text"
    Console().print(_estimate_table(title, estimates))


def _dense_estimates(args: Namespace, look: Any) -> list[Estimate]:
    from forage.retrieval.index.estimate import estimate_dense, index_seconds, measure_encoder
    from forage.retrieval.index.index import missing_extra

    choice = _encoder_choice(args)
    try:
        from forage.retrieval.vectors.sentence_encoder import open_encoder
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    encoder = open_encoder(choice, *args.device[:1])
    rate = measure_encoder(encoder, look.sample) * max(len(args.device), 1)
    found: list[Estimate] = []
    for backend in (args.backend,) if args.backend else DENSE_BACKENDS:
        settings = _settings_that_fit(args, backend)
        seconds = index_seconds(look.num_passages, encoder.dimension, settings)
        size = (look.num_passages, look.num_bytes, encoder.dimension)
        found.append(estimate_dense(*size, settings, rate, seconds))
    return found


def _settings_that_fit(args: Namespace, backend: str) -> FaissSettings:
    """Settings for one of several backends: each reads what is meant for it."""
    from forage.retrieval.vectors.faiss_settings import BUILT_KINDS

    if args.backend is not None:
        return _faiss_settings(args, backend)
    model = BUILT_KINDS[backend]
    given = {name: v for name, v in _given_faiss(args).items() if name in model.model_fields}
    return _make_settings(backend, given)


def _make_settings(backend: str, given: dict[str, Any]) -> FaissSettings:
    from pydantic import ValidationError

    from forage.retrieval.vectors.faiss_settings import BUILT_KINDS

    try:
        return BUILT_KINDS[backend](**given)  # pyright: ignore[reportReturnType] # of the union
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"{_option(str(wrong['loc'][0]))}: {wrong['msg']}") from error


def _estimate_table(title: str, estimates: list[Estimate]) -> Any:
    from rich.table import Table

    from forage.retrieval.index.build_progress import format_duration

    table = Table(title=title, title_justify="left")
    for heading in ("backend", "memory", "disk", "memory to build", "disk to build", "time"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for found in estimates:
        sizes = (found.memory, found.disk, found.build_memory, found.build_disk)
        duration = "" if found.seconds is None else format_duration(found.seconds)
        table.add_row(found.backend, *(_size(value) for value in sizes), duration)
    return table


def _size(num_bytes: int) -> str:
    """``64.5 GB``, in powers of ten."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _refuse(args: Namespace, names: tuple[str, ...], reason: str) -> None:
    """Raise ``UserError`` for the first of these arguments that was given."""
    for name in names:
        if getattr(args, name) not in (None, False, []) or (
            name == "normalise" and args.normalise is not None
        ):
            raise UserError(f"{_option(name)} has no effect here: {reason}")


def _option(name: str) -> str:
    return _OPTION.get(name, "--" + name.replace("_", "-"))

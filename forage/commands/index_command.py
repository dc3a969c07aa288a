"""``forage index``: builds, imports or estimates an index.

The options of the backends come from their settings (``forage.retrieval.index.index``): one per
field, with its description. An option that the chosen backend does not use is an error that names
the backends that do.
"""

from __future__ import annotations

import argparse
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from forage.commands.arguments import DTYPES, local_path, positive
from forage.commands.own_text import OWN_TEXT, add_own_text, corpus_of, update_own
from forage.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from forage.retrieval.index.estimate import CorpusLook, Estimate
    from forage.retrieval.vectors.encoder import EncoderChoice

_ENCODER = (
    *("revision", "query_model", "query_revision", "pooling", "query_prefix", "passage_prefix"),
    *("passage_template", "normalise", "max_length", "dtype", "onnx_file"),
)
_OPTION = {"query_model": "--query-encoder", "onnx_file": "--onnx"}

LOG = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds all arguments of ``forage index``; None means "not given"."""
    from forage.retrieval.index.index import BACKENDS

    add = parser.add_argument
    text = (
        "passages as JSON lines (plain or gzip); or a folder or file of documents (.txt .md .html "
        ".pdf .docx .pptx .epub .eml) and tables (.csv .tsv .xlsx .xls .parquet)"
    )
    add("--corpus", type=local_path, metavar="PATH", help=f"{text}; optional with --tune")
    add("--out", type=Path, metavar="DIR", help="directory of the index (not with --estimate)")
    names = [name for models in BACKENDS.values() for name in models]
    add("--backend", choices=names, help="search method (default bm25)")
    text = "print the size and build time of the index, and build nothing"
    add("--estimate", action="store_true", help=text)
    text = "import an existing FAISS index (its parts, in order) instead of building one"
    add("--adopt", type=Path, nargs="+", metavar="FAISS", help=text)
    text = "start an unfinished build over"
    add("--restart", action="store_true", help=text)
    add("--overwrite", action="store_true", help="replace the index in --out")
    text = "read and index only what changed since the index in --out was built (bm25)"
    add("--update", action="store_true", help=text)
    text = "choose k1 and b on half of these questions; the other half report the gain (bm25)"
    add("--tune", type=Path, metavar="QUESTIONS", help=text)
    text = "with --tune: measure recall in this many passages (default 3)"
    add("--topk", type=positive, metavar="K", help=text)
    add_own_text(parser)
    _add_encoder_arguments(parser.add_argument_group("encoder"))
    for title, models in BACKENDS.items():
        _add_settings(parser.add_argument_group(title), models)


def _add_encoder_arguments(group: argparse._ArgumentGroup) -> None:
    def add(name: str, text: str, **how: Any) -> None:
        group.add_argument(name, help=text, **how)

    add("--encoder", "a directory or a hub id", metavar="MODEL")
    add("--revision", "a commit on the hub", metavar="COMMIT")
    text = "a separate encoder for queries, as in DPR"
    add("--query-encoder", text, dest="query_model", metavar="MODEL")
    add("--query-revision", "a commit on the hub", metavar="COMMIT")
    text = "how token vectors are pooled (default: from the model's files or its family)"
    add("--pooling", text, choices=["mean", "cls", "lasttoken", "max"])
    add("--query-prefix", "text to put before each query", metavar="TEXT")
    add("--passage-prefix", "text to put before each passage", metavar="TEXT")
    text = "how to join title and text, with {title} and {text}"
    add("--passage-template", text, metavar="TEXT")
    add("--normalise", "scale vectors to unit length", action=argparse.BooleanOptionalAction)
    add("--max-length", "maximum tokens to read of a text", type=positive)
    text = "refuse passages that are longer than the encoder reads, instead of warning"
    add("--whole-passages", text, action="store_true")
    text = "the encoder's compute type (default: the fastest one with nearly the same vectors)"
    add("--dtype", text, choices=DTYPES)
    text = "compute with this ONNX file of the model (default onnx/model.onnx)"
    how = {"dest": "onnx_file", "nargs": "?", "const": "onnx/model.onnx", "metavar": "FILE"}
    add("--onnx", text, **how)
    add("--trust-remote-code", "run Python code that comes with the model", action="store_true")
    text = "devices that encode passages, for example cuda:0 cuda:1 (default: a GPU if present)"
    add("--device", text, nargs="+", default=[])


def _add_settings(group: argparse._ArgumentGroup, models: Mapping[str, type[BaseModel]]) -> None:
    """Adds one option per field of the settings; its help names the backends that use it."""
    for name in _names(models):
        fields = {
            backend: model.model_fields[name]
            for backend, model in models.items()
            if name in model.model_fields
        }
        field = next(iter(fields.values()))
        readers = f"{', '.join(fields)}: " if len(models) > 1 else ""
        default = f" (default {field.default})" if field.default not in (None, False) else ""
        value = _value_of([field.annotation for field in fields.values()])
        text = f"{readers}{field.description}{default}"
        group.add_argument(_option_of(name), dest=name, help=text, **value)


def _names(models: Mapping[str, type[BaseModel]]) -> list[str]:
    names = dict.fromkeys(name for model in models.values() for name in model.model_fields)
    return [name for name in names if name != "kind"]


def _value_of(kinds: list[Any]) -> dict[str, Any]:
    """Tells argparse how to read a field of these types: choices, switch, number or string."""
    parts = [part for kind in kinds for part in _parts(kind)]
    choices = list(dict.fromkeys(part for part in parts if isinstance(part, str)))
    if choices:
        return {"choices": choices + (["none"] if type(None) in parts else [])}
    if bool in parts:
        return {"action": "store_true"}
    if int in parts:
        return {"type": positive}
    return {"type": float, "metavar": "X"} if float in parts else {"metavar": "TEXT"}


def _parts(kind: Any) -> list[Any]:
    """Splits a type: ``Literal["a", "b"] | None`` becomes ``"a"``, ``"b"`` and None's type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [part for one in get_args(kind) for part in _parts(one)] or [kind]


def _option_of(name: str) -> str:
    return _OPTION.get(name, "--" + name.replace("_", "-"))


def run(args: Namespace) -> int:
    """Builds, updates, tunes, imports or estimates.

    Raises ``UserError`` for arguments that exclude each other.
    """
    if args.tune is None:
        _refuse(args, ("topk",), "it needs --tune")
        _require(args, "corpus")
    if args.estimate:
        unread = (
            "out",
            "overwrite",
            "update",
            "tune",
            "adopt",
            "restart",
            "whole_passages",
            *_fields("qdrant"),
        )
        _refuse(args, unread, "--estimate builds nothing, and does not cover Qdrant")
        if args.backend == "qdrant":
            raise UserError("--estimate covers bm25 and FAISS's backends; use hnsw as a guide")
        _print_estimates(args)
        return 0
    _require(args, "out")
    if args.corpus is not None:
        _make(args)
    else:
        unread = (*_unread_by_update(), *OWN_TEXT, "update")
        _refuse(args, unread, "without --corpus, --tune only chooses k1 and b")
    if args.tune is not None:
        from forage.commands.index_tuning import tune

        tune(args.out, args.tune, args.topk or 3)
    return 0


def _make(args: Namespace) -> None:
    """Builds, updates or imports the index."""
    if args.update:
        _refuse(args, _unread_by_update(), "--update keeps the settings of the index")
        update_own(args)
        return
    if not args.overwrite:
        from forage.retrieval.store.atomic_directory import refuse_an_index

        refuse_an_index(args.out)
    if args.adopt:
        _import(args)
    else:
        _build(args)
    LOG.info("Wrote the index of %s to %s. Next: forage serve %s", args.corpus, args.out, args.out)


def _unread_by_update() -> tuple[str, ...]:
    """The arguments that only a build reads."""
    build = ("backend", "adopt", "restart", "overwrite", "encoder", *_ENCODER, "whole_passages")
    return (*build, *_fields("bm25", "vectors", "qdrant"), "device", "trust_remote_code")


def _require(args: Namespace, name: str) -> None:
    if getattr(args, name) is None:
        raise UserError(
            f"the following arguments are required: --{name} (see: forage index --help)"
        )


def _build(args: Namespace) -> None:
    from forage.retrieval.index.index import build_backend
    from forage.retrieval.vectors.encoded_corpus import DenseBuild

    backend = args.backend or "bm25"
    vectors = None
    if backend == "bm25":
        unread = ("encoder", *_ENCODER, "device", "trust_remote_code", "restart", "whole_passages")
        _refuse(args, unread, "the backend is bm25")
    settings = _settings(args, backend)
    if backend != "bm25":
        choice = _encoder_choice(args)
        vectors = DenseBuild(
            choice,
            devices=tuple(args.device),
            is_restart=args.restart,
            is_whole=args.whole_passages,
        )
    with corpus_of(args) as (corpus, notes):
        build_backend(corpus, args.out, settings, vectors, notes)


def _import(args: Namespace) -> None:
    read = ("ef_search", "probes")
    unread = [name for name in _fields("bm25", "vectors", "qdrant") if name not in read]
    unread = ["backend", "restart", "whole_passages", *OWN_TEXT, *unread]
    _refuse(args, tuple(unread), "--adopt imports an index unchanged")
    if len(args.device) > 1:
        raise UserError("--adopt only encodes a sample: give a single --device")
    choice = _encoder_choice(args)
    from forage.retrieval.vectors.faiss_settings import ImportedSettings
    from forage.retrieval.vectors.probes import missing_extra

    settings = ImportedSettings(ef_search=args.ef_search, probes=args.probes)
    try:
        from forage.retrieval.vectors.import_faiss import import_faiss
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    import_faiss(args.adopt, args.corpus, args.out, choice, settings, *args.device)


def _encoder_choice(args: Namespace) -> EncoderChoice:
    from forage.retrieval.vectors.encoder import EncoderChoice

    if args.encoder is None:
        raise UserError(
            "vectors need an encoder: give --encoder a directory or a hub id "
            "(for example intfloat/e5-base-v2)"
        )
    given = {name: getattr(args, name) for name in _ENCODER}
    return EncoderChoice(args.encoder, **given, trust_remote_code=args.trust_remote_code)


def _settings(args: Namespace, backend: str, may_read_less: bool = False) -> Any:
    """The settings of a backend from the options given; raises ``UserError``.

    An option that the backend does not use is an error, unless ``may_read_less`` and another
    backend of the same kind uses it.
    """
    from pydantic import ValidationError

    from forage.retrieval.index.index import BACKENDS

    own = next(models for models in BACKENDS.values() if backend in models)
    given: dict[str, Any] = {}
    for name in _fields(*BACKENDS):
        value, option = getattr(args, name), _option_of(name)
        if value is None or value is False:
            continue
        readers = [kind for kind, model in own.items() if name in model.model_fields]
        if backend in readers:
            given[name] = None if value == "none" else value
        elif not readers:
            raise UserError(f"{option} has no effect here: the backend is {backend}")
        elif not may_read_less:
            raise UserError(f"{option} is for {', '.join(readers)}, but the backend is {backend}")
    try:
        return own[backend](**given)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"{_option_of(str(wrong['loc'][0]))}: {wrong['msg']}") from error


def _fields(*groups: str) -> list[str]:
    from forage.retrieval.index.index import BACKENDS

    return [name for group in groups for name in _names(BACKENDS[group])]


def _print_estimates(args: Namespace) -> None:
    from rich import filesize
    from rich.console import Console
    from rich.table import Table

    from forage.retrieval.index.estimate import estimate_bm25, look_at_corpus
    from forage.retrieval.store.build_progress import format_duration

    if args.backend == "bm25" or (args.backend is None and args.encoder is None):
        unread = ("encoder", *_ENCODER, *_fields("vectors"), "device", "trust_remote_code")
        _refuse(args, unread, "without --encoder only bm25 is estimated")
    with corpus_of(args) as (corpus, _):
        look = look_at_corpus(corpus)
    estimates: list[Estimate] = []
    if args.backend in (None, "bm25"):
        estimates.append(estimate_bm25(look, args.language or "auto"))
    if args.encoder is not None or args.backend not in (None, "bm25"):
        estimates += _dense_estimates(args, look)
    about, size = "" if look.is_exact else "about ", filesize.decimal(look.num_bytes)
    title = f"{about}{look.num_passages:,} passages, {about}{size} of text"
    table = Table(title=title, title_justify="left")
    for heading in ("backend", "memory", "disk", "memory to build", "disk to build", "time"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for found in estimates:
        sizes = (found.memory, found.disk, found.build_memory, found.build_disk)
        duration = "" if found.seconds is None else format_duration(found.seconds)
        table.add_row(found.backend, *map(filesize.decimal, sizes), duration)
    Console().print(table)


def _dense_estimates(args: Namespace, look: CorpusLook) -> list[Estimate]:
    from forage.retrieval.index.estimate import estimate_dense, index_seconds, measure_encoder
    from forage.retrieval.index.index import BACKENDS
    from forage.retrieval.vectors.probes import missing_extra

    choice = _encoder_choice(args)
    try:
        from forage.retrieval.vectors.sentence_encoder import open_encoder
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    encoder = open_encoder(choice, *args.device[:1])
    rate = measure_encoder(encoder, look.sample) * max(len(args.device), 1)
    found: list[Estimate] = []
    for backend in (args.backend,) if args.backend else BACKENDS["vectors"]:
        settings = _settings(args, backend, may_read_less=args.backend is None)
        seconds = index_seconds(look.num_passages, encoder.dimension, settings)
        size = (look.num_passages, look.num_bytes, encoder.dimension)
        found.append(estimate_dense(*size, settings, rate, seconds))
    return found


def _refuse(args: Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        value = getattr(args, name)
        is_given = value is not None and value is not False and value != []
        if is_given or (name == "normalise" and value is False):
            raise UserError(f"{_option_of(name)} has no effect here: {reason}")

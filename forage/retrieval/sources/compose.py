"""What ``forage serve`` was asked to serve, and the source and pages made from it.

A source holds other sources: each one named is opened, several are fused, then the reranker stands
before them and the recorder before all. A new kind of source is a file of its own and a line in
``_OPENERS``. HTTP is ``forage.retrieval.serve``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
from pydantic import Field, SecretStr

from forage.errors import UserError
from forage.retrieval.cache import CACHE_BYTES
from forage.retrieval.index.index import Index, OpenOptions, open_index, read_manifest
from forage.retrieval.serve.limits import Limits
from forage.retrieval.source import Source
from forage.retrieval.sources.fusion import RRF_K, Fused
from forage.retrieval.sources.lucene import Lucene
from forage.retrieval.sources.recording import Recorder, Replay
from forage.retrieval.sources.reranker import PUBLISHED_MODEL, CrossEncoderModel, Reranked
from forage.retrieval.sources.sharded import Sharded
from forage.retrieval.sources.stored_pages import PageStore, open_pages
from forage.retrieval.vectors.encoder import Dtype
from forage.retrieval.web.web_pages import WebPages
from forage.retrieval.web.web_settings import read_web_settings
from forage.retrieval.web.web_source import WebSource
from forage.retrieval.wire import WIKIPEDIA_PAGE
from forage.retrieval.words.bm25_index import BM25Manifest
from forage.settings import Strict

# A shard that hangs must not hold up all searches for the longest time that a request may take.
_SHARDS_S = 100.0

# Passages of one index that are looked up by id in another before the two are fused.
_NUM_COMPARED = 64


class FusionSettings(Strict):
    """How several sources become one; see ``forage.retrieval.sources.fusion``."""

    depth: int = Field(default=100, ge=1)
    k: int = Field(default=RRF_K, ge=0)


class RerankSettings(Strict):
    """A cross-encoder before the source; see ``forage.retrieval.sources.reranker``."""

    model: str = PUBLISHED_MODEL
    revision: str | None = None
    depth: int = Field(default=10, ge=1)
    device: str | None = None
    dtype: Dtype = "float32"
    batch_size: int = Field(default=32, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    trust_remote_code: bool = False


class LuceneSettings(Strict):
    """The parameters of Lucene's BM25, which are chosen when an index is searched."""

    k1: float = Field(default=0.9, ge=0)
    b: float = Field(default=0.4, ge=0, le=1)


class ServeSettings(Strict):
    """Everything that ``forage serve`` reads from its command line.

    ``sources`` are directories of indexes, ``lucene:DIR``, ``ray:APP``, ``web:PROVIDER`` or
    ``replay:FILE``; ``web`` holds ``key=value`` settings of the provider, ``options`` are for
    indexes of vectors; ``record`` keeps every answer in a file; ``verify`` reads all
    files of indexes and pages before they are served. ``allow_hosts`` are names of the
    server beside those of its ``host``; ``no_token`` lets everybody search what costs money. None
    stands for "not given": a setting that nothing would read is refused.
    """

    sources: tuple[str, ...] = Field(min_length=1)
    web: tuple[str, ...] = ()
    options: OpenOptions = OpenOptions()
    lucene: LuceneSettings | None = None
    ray_address: str | None = None
    fusion: FusionSettings | None = None
    rerank: RerankSettings | None = None
    record: Path | None = None
    pages: Path | None = None
    verify: bool = False
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    allow_hosts: tuple[str, ...] = ()
    topk: int = Field(default=3, ge=1)
    page_url: str = WIKIPEDIA_PAGE
    token: SecretStr | None = None
    no_token: bool = False
    cache_size: int = Field(default=CACHE_BYTES, ge=0)
    drain_s: float = Field(default=10.0, ge=0)
    limits: Limits = Limits()


def open_source(settings: ServeSettings) -> Source:
    """Open what is to be served; raises ``UserError``."""
    _refuse_unread(settings)
    with ExitStack() as opened:
        parts: list[Source] = []
        for name in settings.sources:
            kind, place = _kind_and_name(name)
            parts.append(_OPENERS[kind](place, settings))
            opened.callback(parts[-1].close)
        source = parts[0]
        if len(parts) > 1:
            _refuse_other_corpora([part for part in parts if isinstance(part, Index)])
            fusion = settings.fusion or FusionSettings()
            source = Fused(parts, fusion.depth, fusion.k)
        if settings.rerank is not None:
            model = CrossEncoderModel(**settings.rerank.model_dump(exclude={"depth"}))
            source = Reranked(source, model, settings.rerank.depth)
        if settings.record is not None:
            source = Recorder(source, settings.record)
        opened.pop_all()
        return source


def is_paid(settings: ServeSettings) -> bool:
    """Whether a search costs money."""
    return "web" in (_kind_and_name(text)[0] for text in settings.sources)


def open_page_store(settings: ServeSettings) -> PageStore | WebPages | None:
    """Open the pages that ``/access`` reads, where there are some; raises ``UserError``.

    ``pages`` is a file, or ``live``: pages of the web, fetched when they are asked for.
    """
    if settings.pages is None:
        return None
    return (
        WebPages()
        if settings.pages == Path("live")
        else open_pages(settings.pages, is_verified=settings.verify)
    )


def _open_lucene(name: str, settings: ServeSettings) -> Source:
    lucene = settings.lucene or LuceneSettings()
    return Lucene(Path(name), lucene.k1, lucene.b)


# What stands before the colon in ``web:serper``; a name without one of these is an index.
_OPENERS: Mapping[str, Callable[[str, ServeSettings], Source]] = {
    "web": lambda name, settings: WebSource(read_web_settings(name, settings.web)),
    "replay": lambda name, settings: Replay(Path(name)),
    "lucene": _open_lucene,
    "ray": lambda name, settings: Sharded(
        name, settings.ray_address or "auto", min(settings.limits.deadline_s, _SHARDS_S)
    ),
    "index": lambda name, settings: open_index(Path(name), settings.options, settings.verify),
}


def _kind_and_name(text: str) -> tuple[str, str]:
    """``web:serper`` is ``("web", "serper")``; what begins with no kind is an index.

    Raises ``UserError`` where it is like neither.
    """
    kind, colon, name = text.partition(":")
    if kind in _OPENERS and name and kind != "index":
        return kind, name
    if colon and "/" not in kind and not Path(text).exists():
        raise UserError(
            f"{text!r} is no source: name the directory of an index, lucene:DIR, ray:APP, "
            "web:PROVIDER or replay:FILE"
        )
    return "index", text


def _refuse_unread(settings: ServeSettings) -> None:
    """Raise ``UserError`` for a setting that nothing among the sources would read."""
    named = ", ".join(settings.sources)
    kinds = [_kind_and_name(text)[0] for text in settings.sources]
    if len(set(settings.sources)) < len(settings.sources):
        raise UserError(f"a source is named twice ({named}); fusion needs different ones")
    if settings.web and kinds.count("web") != 1:
        raise UserError(f"--web says how to ask one provider, and {named} names none or several")
    has_pages = settings.pages not in (None, Path("live"))
    if settings.verify and "index" not in kinds and not has_pages:
        raise UserError(f"--verify is for indexes and pages of Forage, and {named} names none")
    if settings.lucene is not None and "lucene" not in kinds:
        raise UserError("--k1 and --b are for lucene:DIR; an index has those it was built with")
    if settings.ray_address is not None and "ray" not in kinds:
        raise UserError(f"--ray-address is for ray:APP, and {named} names none")
    if settings.fusion is not None and len(kinds) == 1:
        raise UserError("--fuse-depth and --fuse-k are for several sources; only one is named")
    if settings.rerank is not None and settings.topk > settings.rerank.depth:
        raise UserError(
            f"--topk {settings.topk} is above --rerank-depth {settings.rerank.depth}, and nothing "
            "below that depth is found; raise one or lower the other"
        )
    if settings.options != OpenOptions() and not _has_vectors(settings.sources):
        raise UserError(
            "--device, --dtype, --gpus, --encoder and --trust-remote-code are for an index of "
            f"vectors, and {named} names none"
        )


def _has_vectors(sources: tuple[str, ...]) -> bool:
    places = [name for kind, name in map(_kind_and_name, sources) if kind == "index"]
    manifests = [read_manifest(Path(place)) for place in places]
    return not all(isinstance(manifest, BM25Manifest) for manifest in manifests)


def _refuse_other_corpora(indexes: list[Index]) -> None:
    """Raise ``UserError`` where two indexes have different passages under one id.

    Every search would fail in the end; a sample of ids shows it before the first.
    """
    for one, other in pairwise(indexes):
        if one.manifest.corpus_sha256 == other.manifest.corpus_sha256:
            continue
        for row in np.linspace(0, len(one) - 1, min(_NUM_COMPARED, len(one))).astype(int).tolist():
            passage = one.store.passage(row)
            if other.store.by_id(passage.id) not in (None, passage):
                raise UserError(
                    f"{one.name} and {other.name} have different passages with the id "
                    f"{passage.id!r}: they are of different corpora; fuse indexes of one corpus"
                )

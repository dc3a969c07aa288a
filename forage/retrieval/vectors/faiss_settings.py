"""How vectors are searched: the settings of each FAISS index, as the manifest keeps them.

Memory and speed are traded for recall here; ``docs/retrieval.md`` has what each takes. FAISS itself
is imported by ``forage.retrieval.vectors.faiss_index`` alone.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator

from forage.errors import UserError
from forage.retrieval.store.manifest import MAX_COUNT, Count
from forage.retrieval.vectors.vector_shards import VectorDtype
from forage.settings import Strict

Storage = Literal["float32", "float16", "int8"]
RescoreDtype = Literal["float16", "int8"]

# FAISS warns below 39 training vectors a centroid; a byte of product quantisation has 256.
_TRAIN_PER_CENTROID = 40
_CENTROIDS_PER_BYTE = 256
# How many rows FAISS is asked for: to score again, and where fewer would do.
_CANDIDATES, _FEWEST = 200, 32


_STORAGE_HELP = "numbers that the index keeps its vectors in"
_RESCORE_HELP = "numbers that the candidates' vectors are kept in, to score them again"
_CANDIDATES_HELP = "passages scored again from those vectors"
_LISTS_HELP = "lists that the vectors are divided into (about 4 sqrt(N))"
_PROBES_HELP = "lists that a search reads"
_CODE_BYTES_HELP = "bytes that a vector is compressed to (one for 8 dimensions)"


class FaissKind(Strict):
    """The settings of one kind of FAISS index; each description is the help of its option."""


class FlatSettings(FaissKind):
    """Exact: every vector is compared."""

    kind: Literal["flat"] = "flat"
    storage: Literal["float32", "float16"] = Field(default="float32", description=_STORAGE_HELP)

    @field_validator("storage", mode="before")
    @classmethod
    def _int8_is_sq8(cls, storage: object) -> object:
        if storage == "int8":
            raise ValueError("flat is stored in float32 or float16; its int8 form is --backend sq8")
        return storage


class Sq8Settings(FaissKind):
    """Every vector is compared in 8 bits a component, and the best ones exactly."""

    kind: Literal["sq8"] = "sq8"
    rescore: RescoreDtype | None = Field(default="float16", description=_RESCORE_HELP)
    candidates: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_CANDIDATES_HELP)


class HnswSettings(FaissKind):
    """A graph that is walked (https://arxiv.org/abs/1603.09320): fast, and larger than flat."""

    kind: Literal["hnsw"] = "hnsw"
    storage: Storage = Field(default="float32", description=_STORAGE_HELP)
    links: Count = Field(default=64, ge=2, description="neighbours kept for each node")
    ef_construction: Count = Field(
        default=200, ge=1, description="candidates looked at for each node while building"
    )
    ef_search: Count = Field(default=128, ge=1, description="candidates looked at in a search")


class IvfSettings(FaissKind):
    """Vectors in lists by their nearest centroid; a search reads the ``probes`` nearest lists."""

    kind: Literal["ivf"] = "ivf"
    storage: Storage = Field(default="float32", description=_STORAGE_HELP)
    lists: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_LISTS_HELP)
    probes: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_PROBES_HELP)


class PqSettings(FaissKind):
    """Product quantisation (``code_bytes`` a vector), the best candidates scored again exactly."""

    kind: Literal["pq"] = "pq"
    code_bytes: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_CODE_BYTES_HELP)
    rescore: RescoreDtype | None = Field(default="float16", description=_RESCORE_HELP)
    candidates: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_CANDIDATES_HELP)


class IvfPqSettings(FaissKind):
    """Lists as in ivf, with product quantisation inside them, and candidates scored again."""

    kind: Literal["ivfpq"] = "ivfpq"
    lists: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_LISTS_HELP)
    probes: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_PROBES_HELP)
    code_bytes: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_CODE_BYTES_HELP)
    rescore: RescoreDtype | None = Field(default="float16", description=_RESCORE_HELP)
    candidates: int | None = Field(default=None, ge=1, le=MAX_COUNT, description=_CANDIDATES_HELP)


class ImportedSettings(FaissKind):
    """An index that someone else built, searched as it is; ``structure`` is its class in FAISS."""

    kind: Literal["adopted"] = "adopted"
    structure: str = ""
    ef_search: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    probes: int | None = Field(default=None, ge=1, le=MAX_COUNT)


FaissSettings = Annotated[
    FlatSettings
    | Sq8Settings
    | HnswSettings
    | IvfSettings
    | PqSettings
    | IvfPqSettings
    | ImportedSettings,
    Field(discriminator="kind"),
]
BUILT_KINDS: dict[str, type[FaissKind]] = {
    "flat": FlatSettings,
    "sq8": Sq8Settings,
    "hnsw": HnswSettings,
    "ivf": IvfSettings,
    "pq": PqSettings,
    "ivfpq": IvfPqSettings,
}


def fit_to(settings: FaissSettings, num_rows: int, dimension: int) -> FaissSettings:
    """The settings with what was left open decided for a corpus; raises ``UserError``.

    Lists: about 4 sqrt(N), a power of two, so few that each can be learnt. Probes: one list in 64,
    from 8 to 256. Bytes of product quantisation: one for 8 dimensions. Candidates: 32 of 8
    bits, 200 of product quantisation.
    """
    changes: dict[str, int] = {}
    if isinstance(settings, Sq8Settings | PqSettings | IvfPqSettings):
        if settings.rescore is not None:
            few = _FEWEST if isinstance(settings, Sq8Settings) else _CANDIDATES
            changes["candidates"] = settings.candidates or few
        elif settings.candidates is not None:
            raise UserError(
                f"--candidates {settings.candidates} has no effect where nothing is scored again; "
                "give --rescore float16 or int8 too"
            )
    if isinstance(settings, IvfSettings | IvfPqSettings):
        lists = settings.lists or _num_lists(num_rows)
        if lists > num_rows:
            raise UserError(f"--lists {lists} is more than the {num_rows} passages of the corpus")
        probes = settings.probes or min(max(lists // 64, 8), lists, 256)
        if probes > lists:
            raise UserError(f"--probes {probes} is more than the {lists} lists")
        changes |= {"lists": lists, "probes": probes}
    if isinstance(settings, PqSettings | IvfPqSettings):
        code_bytes = settings.code_bytes or _code_bytes(dimension)
        if dimension % code_bytes:
            raise UserError(
                f"--code-bytes {code_bytes} does not divide the {dimension} dimensions of the "
                f"encoder; {_code_bytes(dimension)} does"
            )
        if num_rows < _CENTROIDS_PER_BYTE:
            raise UserError(
                f"{settings.kind} learns {_CENTROIDS_PER_BYTE} centroids and needs as many "
                f"passages, the corpus has {num_rows}; take --backend flat"
            )
        changes["code_bytes"] = code_bytes
    return settings.model_copy(update=changes)


def num_training_rows(settings: FaissSettings, num_rows: int) -> int:
    """How many vectors an index learns its centroids or ranges from; 0 where it learns nothing."""
    wanted = 0
    if isinstance(settings, IvfSettings | IvfPqSettings):
        wanted = _TRAIN_PER_CENTROID * (settings.lists or 1)
    if isinstance(settings, PqSettings | IvfPqSettings):
        wanted = max(wanted, _CENTROIDS_PER_BYTE * 2 * _TRAIN_PER_CENTROID)
    if isinstance(settings, Sq8Settings) or getattr(settings, "storage", None) == "int8":
        wanted = max(wanted, 2**17)
    return min(wanted, num_rows)


def stored_dtype(settings: FaissSettings) -> VectorDtype:
    """In which numbers a build keeps vectors on disk: those that are needed of them later."""
    rescore = rescore_dtype(settings)
    if rescore is not None:
        return rescore
    return "float32" if getattr(settings, "storage", None) == "float32" else "float16"


def rescore_dtype(settings: FaissSettings) -> RescoreDtype | None:
    """The numbers from which candidates are scored again, None where they are not."""
    if isinstance(settings, Sq8Settings | PqSettings | IvfPqSettings):
        return settings.rescore
    return None


def num_candidates(settings: FaissSettings, topk: int) -> int:
    """How many rows to ask FAISS for.

    At least a fixed number, so that the first k of a search for more (the batcher shares one
    search among requests) are the search for k, up to that number.
    """
    if isinstance(settings, Sq8Settings | PqSettings | IvfPqSettings) and settings.candidates:
        return max(topk, settings.candidates)
    if isinstance(settings, HnswSettings):
        return max(topk, settings.ef_search)
    if isinstance(settings, ImportedSettings) and settings.ef_search:
        return max(topk, settings.ef_search)
    return max(topk, _FEWEST)


def _num_lists(num_rows: int) -> int:
    most = max(num_rows // _TRAIN_PER_CENTROID, 1)
    wanted = min(4 * num_rows**0.5, most)
    return 2 ** int(math.log2(max(wanted, 1)))


def _code_bytes(dimension: int) -> int:
    """The largest divisor of the dimension that is at most an eighth of it."""
    return next(size for size in range(max(dimension // 8, 1), 0, -1) if dimension % size == 0)

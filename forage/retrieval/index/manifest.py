"""The manifest of an index directory: what the index is made of, and how that is checked.

Written last when an index is built, read first when it is opened. One model for each kind of
backend over the fields that all share; ``backend`` says which. Building and opening are
``forage.retrieval.index.build``'s and ``forage.retrieval.index.index``'s.
"""

from __future__ import annotations

from hashlib import file_digest
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from forage.data.corpus import LINES_FILE, StoredCorpus
from forage.errors import UserError
from forage.retrieval.vectors.encoder import EncoderSpec
from forage.retrieval.vectors.faiss_settings import FaissSettings
from forage.retrieval.vectors.qdrant_settings import Distance, QdrantSettings

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"

# Hashing costs a second a gigabyte at each opening: above this the size alone is compared.
_MAX_HASHED_BYTES = 256 * 2**20


class _Common(BaseModel):
    """What every manifest says; ``library`` names the packages that built it, with versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    num_passages: int = Field(ge=1)
    corpus_bytes: int = Field(ge=1)
    corpus_sha256: str
    library: str


class BM25Manifest(_Common):
    """An index of words."""

    backend: Literal["bm25"] = "bm25"
    k1: float
    b: float
    tokenizer: str


class DenseManifest(_Common):
    """An index of vectors; ``backend`` repeats the kind of its FAISS settings.

    ``source_files`` are those of an adopted index, with the lowest cosine of its check.
    """

    backend: Literal["flat", "sq8", "hnsw", "ivf", "pq", "ivfpq", "adopted"]
    encoder: EncoderSpec
    faiss: FaissSettings
    metric: Literal["inner_product", "l2"] = "inner_product"
    index_bytes: int = Field(ge=1)
    index_sha256: str
    source_files: tuple[str, ...] = ()
    checked_cosine: float | None = None

    @model_validator(mode="after")
    def _backend_is_the_kind(self) -> Self:
        if self.backend != self.faiss.kind:
            raise ValueError(f"backend is {self.backend}, but faiss.kind is {self.faiss.kind}")
        return self


class QdrantManifest(_Common):
    """An index of vectors in a Qdrant collection.

    ``url`` is the server's, None for the embedded mode (the collection then lies in the index
    directory, and there are no ``settings``).
    """

    backend: Literal["qdrant"] = "qdrant"
    encoder: EncoderSpec
    collection: str
    distance: Distance
    url: str | None
    settings: QdrantSettings | None


AnyManifest = BM25Manifest | DenseManifest | QdrantManifest
Manifest = Annotated[AnyManifest, Field(discriminator="backend")]

_ADAPTER: TypeAdapter[AnyManifest] = TypeAdapter(Manifest)


def write_manifest(directory: Path, manifest: AnyManifest) -> None:
    """Write it into the directory of its index."""
    text = manifest.model_dump_json(indent=2) + "\n"
    (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(directory: Path) -> AnyManifest:
    """The manifest of an index directory; raises ``UserError`` that names what is wrong."""
    path = directory / MANIFEST_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} is not an index (it has no {MANIFEST_FILE}); make one with "
            f"`forage index --corpus FILE --out {directory}`"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    try:
        manifest = _ADAPTER.validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"]) or "the file"
        raise UserError(f"{path}: {where}: {wrong['msg']}; build the index again") from error
    require_same(
        directory, "format version", manifest.format_version, "this Forage reads", FORMAT_VERSION
    )
    return manifest


def check_corpus(directory: Path, manifest: AnyManifest, num_rows: int) -> None:
    """Compare the manifest with the corpus beside it (``num_rows`` passages)."""
    require_same(directory, "passages", manifest.num_passages, "its corpus holds", num_rows)
    _check_file(
        directory, LINES_FILE, "corpus", manifest.corpus_bytes, manifest.corpus_sha256, "its corpus"
    )


def check_vectors_file(directory: Path, name: str, manifest: DenseManifest) -> None:
    """Compare the manifest with the FAISS file beside it."""
    _check_file(
        directory, name, "index", manifest.index_bytes, manifest.index_sha256, "its FAISS file"
    )


def require_same(
    directory: Path, what: str, stated: object, other_side: str, found: object
) -> None:
    """Raise ``UserError`` that names both sides where they differ."""
    if stated != found:
        raise UserError(
            f"{directory}: the manifest says {what} {stated}, but {other_side} {found}; "
            "build the index again from its corpus"
        )


def common_fields(stored: StoredCorpus) -> dict[str, int | str]:
    """The fields that a stored corpus settles."""
    return {
        "num_passages": stored.num_passages,
        "corpus_bytes": stored.num_bytes,
        "corpus_sha256": stored.sha256,
    }


def hash_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _check_file(
    directory: Path, name: str, what: str, num_bytes: int, sha256: str, holder: str
) -> None:
    path = directory / name
    try:
        found_bytes = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; build the index again") from error
    require_same(directory, f"{what} bytes", num_bytes, f"{holder} has", found_bytes)
    if found_bytes <= _MAX_HASHED_BYTES:
        require_same(directory, f"{what} sha256", sha256, f"{holder} has", hash_file(path))

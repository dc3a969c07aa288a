"""The manifest of an index directory: what the index is made of, and how that is checked.

It is written last when an index is built and read first when it is opened. Here are the fields that
all backends share; each backend's file has a model of its own over them, and
``forage.retrieval.index.index`` lists these.
"""

from __future__ import annotations

from hashlib import file_digest
from pathlib import Path

from pydantic import Field

from forage.data.corpus import LINES_FILE, StoredCorpus
from forage.errors import UserError
from forage.settings import Strict

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"

# Hashing costs a second a gigabyte at each opening: above this the size alone is compared.
_MAX_HASHED_BYTES = 256 * 2**20


class CommonManifest(Strict):
    """What every manifest says; ``library`` names the packages that built it, with versions."""

    format_version: int = FORMAT_VERSION
    num_passages: int = Field(ge=1)
    corpus_bytes: int = Field(ge=1)
    corpus_sha256: str
    library: str


def write_manifest(directory: Path, manifest: CommonManifest) -> None:
    """Write it into the directory of its index."""
    text = manifest.model_dump_json(indent=2) + "\n"
    (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def check_corpus(directory: Path, manifest: CommonManifest, num_rows: int) -> None:
    """Compare the manifest with the corpus beside it (``num_rows`` passages)."""
    require_same(directory, "passages", manifest.num_passages, "its corpus holds", num_rows)
    check_file(
        directory, LINES_FILE, "corpus", manifest.corpus_bytes, manifest.corpus_sha256, "its corpus"
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


def check_file(
    directory: Path, name: str, what: str, num_bytes: int, sha256: str, holder: str
) -> None:
    """Compare a file's size with the stated one, and its digest where it is not too large."""
    path = directory / name
    try:
        found_bytes = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; build the index again") from error
    require_same(directory, f"{what} bytes", num_bytes, f"{holder} has", found_bytes)
    if found_bytes <= _MAX_HASHED_BYTES:
        require_same(directory, f"{what} sha256", sha256, f"{holder} has", hash_file(path))

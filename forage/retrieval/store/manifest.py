"""The manifest of an index directory: records what the index is made of, and verifies it.

It is written last when an index is built and read first when it is opened. This file has the fields
that all backends share; each backend's file extends them, and ``forage.retrieval.index.index``
lists the backends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Annotated

from pydantic import Field

from forage.data.corpus_store import LINES_FILE, StoredCorpus
from forage.errors import UserError
from forage.retrieval.store.index_files import FileSum, check_file_sums, sum_file
from forage.settings import Strict

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
MAX_COUNT = 10_000_000
Count = Annotated[int, Field(le=MAX_COUNT)]
"""A bounded number of candidates, lists, links etc.: libraries allocate what a manifest says."""

# Qdrant's store, which its client rewrites at each opening and verifies itself.
_LIVING = frozenset({"qdrant"})
# Suffixes of the files that opening an index reads.
_READ_SUFFIXES = {".npy", ".json", ".jsonl", ".faiss"}
_REMEDY = "build the index again from its corpus"

# sha256 takes two seconds per gigabyte. Above this size, only sizes are compared; the limit is
# lower for files that also have the faster sums.
_MAX_HASHED_BYTES = 256 * 2**20
_MAX_HASHED_TWICE_BYTES = 16 * 2**20


class CommonManifest(Strict):
    """Fields of every manifest; ``library``: the packages that built the index, with versions.

    ``files``: the sums of all other files in the directory; older indexes have none.
    """

    format_version: int = FORMAT_VERSION
    num_passages: int = Field(ge=1, lt=2**40)
    corpus_bytes: int = Field(ge=1, lt=2**50)
    corpus_sha256: str
    library: str
    files: dict[str, FileSum] | None = None

    def digest(self) -> str:
        """Identifies the index; leaves out ``files``, which older indexes lack."""
        return sha256(self.model_dump_json(exclude={"files"}).encode()).hexdigest()[:16]


def write_manifest(directory: Path, manifest: CommonManifest) -> None:
    text = manifest.model_dump_json(indent=2) + "\n"
    (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def seal(directory: Path, without: Collection[str] = ()) -> None:
    """Writes the sums of a finished index's files into its manifest, if there is one.

    ``without``: files and folders that are not part of the index.
    """
    path = directory / MANIFEST_FILE
    if not path.exists():
        return
    tree = json.loads(path.read_text(encoding="utf-8"))
    names = sorted(file.relative_to(directory) for file in directory.rglob("*") if file.is_file())
    tree["files"] = {
        name.as_posix(): sum_file(directory / name).model_dump()
        for name in names
        if name.parts[0] not in (MANIFEST_FILE, *_LIVING, *without)
    }
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def check_files(
    directory: Path, manifest: CommonManifest, is_whole: bool = False, prefix: str = ""
) -> None:
    """Compares the files that start with ``prefix`` with the manifest; raises ``UserError``.

    ``is_whole``: read even the largest ones to the end.
    """
    if manifest.files is None:
        logger.warning(
            "%s has no checksums (an older version built it), so damage may go unnoticed until "
            "it is built again",
            directory,
        )
        return
    files = {name: found for name, found in manifest.files.items() if name.startswith(prefix)}
    present = {
        file.relative_to(directory).as_posix()
        for file in directory.rglob("*")
        if file.suffix in _READ_SUFFIXES
    }
    for name in sorted(present - {*manifest.files, MANIFEST_FILE}):
        if name.startswith(prefix) and name.partition("/")[0] not in _LIVING:
            raise UserError(f"{directory / MANIFEST_FILE} has no checksum of {name}; {_REMEDY}")
    check_file_sums(directory, files, is_whole, _REMEDY)


def check_corpus(directory: Path, manifest: CommonManifest, num_rows: int) -> None:
    """Compares the manifest with its corpus (``num_rows`` passages)."""
    require_same(directory, "passages", manifest.num_passages, "its corpus holds", num_rows)
    stated = manifest.corpus_bytes, manifest.corpus_sha256
    check_file(directory, manifest, LINES_FILE, "corpus", *stated, "its corpus")


def require_same(
    directory: Path, what: str, stated: object, other_side: str, found: object
) -> None:
    """Raises ``UserError`` that names both sides if they differ."""
    if stated != found:
        raise UserError(
            f"{directory}: the manifest says {what} {stated}, but {other_side} {found}; "
            "build the index again from its corpus"
        )


def common_fields(stored: StoredCorpus) -> dict[str, int | str]:
    """The values of the fields that a stored corpus determines."""
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
    directory: Path,
    manifest: CommonManifest,
    name: str,
    what: str,
    num_bytes: int,
    digest: str,
    holder: str,
) -> None:
    """Compares a file's size with the manifest's, and its digest unless it is too large."""
    path = directory / name
    try:
        found_bytes = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; build the index again") from error
    require_same(directory, f"{what} bytes", num_bytes, f"{holder} has", found_bytes)
    if found_bytes <= (_MAX_HASHED_BYTES if manifest.files is None else _MAX_HASHED_TWICE_BYTES):
        require_same(directory, f"{what} sha256", digest, f"{holder} has", hash_file(path))

"""Your own documents as text: .txt, .md, .html, .pdf and .docx files, alone or in a folder.

Each file becomes an ``OwnDocument`` with its title, its text and marks where a page or a section
begins. A file that cannot be read within the limits, has no text, or is a link out of the folder,
is logged and skipped. ``document_formats.py`` reads the formats, ``table_rows.py`` tables;
``splitting.py`` splits documents into passages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forage.data.corpus import without_links_out
from forage.data.documents.document_formats import READERS, Mark
from forage.data.documents.document_process import DocumentProcess
from forage.errors import UserError

logger = logging.getLogger(__name__)

_MAX_NAMED = 20  # skipped files are named up to here, then counted


@dataclass(frozen=True, slots=True)
class OwnDocument:
    """A text with a title; each of its passages gets ``fields`` on its corpus line."""

    id: str
    title: str
    text: str
    marks: tuple[Mark, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def read_documents(path: Path) -> Iterator[OwnDocument]:
    """The documents in a file, or in a folder and its subfolders, in order of name.

    Hidden files are skipped. Raises ``UserError`` if nothing can be read.
    """
    files = document_files(path)
    base = path if path.is_dir() else path.parent
    num_read, num_left_out = 0, 0
    with DocumentProcess() as process:
        for file in files:
            try:
                document = _document(process, file, file.relative_to(base).as_posix())
            except ValueError as error:
                num_left_out += 1
                if num_left_out <= _MAX_NAMED:
                    logger.warning("skipping %s: %s", file, error)
                continue
            num_read += 1
            yield document
    if num_left_out:
        logger.warning("skipped %d of %d files", num_left_out, len(files))
    if not num_read:
        raise UserError(f"{path} contains no document with readable text")


def document_files(path: Path) -> list[Path]:
    """The documents at ``path``, in order of name; raises ``UserError`` if there are none."""
    if not path.is_dir():
        return [path]
    files = without_links_out(
        path,
        (file for file in path.rglob("*") if _is_document(file, path)),
    )
    if not files:
        raise UserError(f"{path} contains no documents; supported are {', '.join(READERS)} files")
    return files


def _is_document(file: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not is_hidden and file.suffix.lower() in READERS and file.is_file()


def _document(process: DocumentProcess, file: Path, name: str) -> OwnDocument:
    found = process.read(file)
    if not found.text.strip():
        raise ValueError("it contains no text (scanned pages need OCR first)")
    return OwnDocument(name, found.title or file.stem, found.text, found.marks, {"file": name})

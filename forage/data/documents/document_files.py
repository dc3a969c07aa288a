"""One's own documents as text: .txt, .md, .html, .pdf and .docx files, alone or in a folder.

Each file becomes a ``OwnDocument`` with its title, its text and marks that say where a page or a
section begins. pypdf, python-docx and trafilatura read the formats; this is the one file that
imports them for documents. A file that cannot be read, or that holds no text, is named in the log
and left out. ``table_rows.py`` reads tables; ``splitting.py`` cuts documents into passages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forage.errors import UserError

logger = logging.getLogger(__name__)

_MAX_NAMED = 20  # files that are left out are named up to here, then counted
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t#]*$")
_FENCE = re.compile(r"^\s{0,3}(```|~~~)")


@dataclass(frozen=True, slots=True)
class Mark:
    """From character ``start`` on, ``name`` (a page, a section) is ``value``."""

    start: int
    name: str
    value: str | int


@dataclass(frozen=True, slots=True)
class OwnDocument:
    """A text with a title; ``fields`` go onto the corpus line of each of its passages."""

    id: str
    title: str
    text: str
    marks: tuple[Mark, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Read:
    """What a file says: its title ("" where it names none), its text, and its marks."""

    title: str
    text: str
    marks: tuple[Mark, ...] = ()


def read_documents(path: Path) -> Iterator[OwnDocument]:
    """The documents of a file, or of a folder and the folders in it, in the order of their names.

    Hidden files are passed over. Raises ``UserError`` where nothing can be read.
    """
    files = document_files(path)
    base = path if path.is_dir() else path.parent
    num_read, num_left_out = 0, 0
    for file in files:
        name = file.relative_to(base).as_posix()
        try:
            document = _document(file, name)
        except ModuleNotFoundError:
            raise  # the command line says which extra is missing
        except Exception as error:  # the boundary of the parsers: files may hold anything
            num_left_out += 1
            if num_left_out <= _MAX_NAMED:
                reason = str(error) or type(error).__name__
                logger.warning("%s is left out: %s", file, reason)
            continue
        num_read += 1
        yield document
    if num_left_out:
        logger.warning("%d of %d files are left out", num_left_out, len(files))
    if not num_read:
        raise UserError(f"{path} holds no document with text that can be read")


def document_files(path: Path) -> list[Path]:
    """The documents at ``path``, by name; raises ``UserError`` where there is none."""
    if not path.is_dir():
        return [path]
    files = sorted(
        file
        for file in path.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.suffix.lower() in READERS
        and file.is_file()
    )
    if not files:
        raise UserError(f"{path} holds no document; a folder may hold {', '.join(READERS)} files")
    return files


def _document(file: Path, name: str) -> OwnDocument:
    found = READERS[file.suffix.lower()](file)
    if not found.text.strip():
        raise ValueError("it holds no text (pages that were scanned need OCR first)")
    return OwnDocument(name, found.title or file.stem, found.text, found.marks, {"file": name})


def _read_markdown(path: Path) -> _Read:
    """The text as it stands; the first heading is the title, each heading begins a section."""
    text = _decoded(path)
    marks: list[Mark] = []
    start, is_code = 0, False
    for line in text.splitlines(keepends=True):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code and (heading := _HEADING.match(line.rstrip())):
            marks.append(Mark(start, "section", heading[1]))
        start += len(line)
    return _Read(str(marks[0].value) if marks else "", text, tuple(marks))


def _read_html(path: Path) -> _Read:
    """What a person would read of a page, without its menus and scripts."""
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    source = _decoded(path)
    about = trafilatura.extract_metadata(source)
    text = trafilatura.extract(source, favor_recall=True, include_comments=False)
    return _Read((about.title if about else "") or "", text or trafilatura.html2txt(source))


def _read_pdf(path: Path) -> _Read:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    with PdfReader(path) as reader:
        title = (reader.metadata.title if reader.metadata else "") or ""
        pages = [page.extract_text() for page in reader.pages]
    return _joined(title, [(("page", n), text) for n, text in enumerate(pages, start=1)], "\n\n")


def _read_docx(path: Path) -> _Read:
    """Paragraphs and tables in their order; the styles Title and Heading N make sections."""
    import docx
    from docx.opc.exceptions import PackageNotFoundError
    from docx.table import Table

    try:
        document = docx.Document(str(path))
    except PackageNotFoundError as error:
        raise ValueError("it is no .docx file, whatever its name says") from error
    title = document.core_properties.title
    parts: list[tuple[tuple[str, str | int] | None, str]] = []
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            rows = ["\t".join(cell.text for cell in row.cells) for row in block.rows]
            parts.append((None, "\n".join(rows)))
            continue
        style = (block.style.name or "") if block.style else ""
        is_heading = bool(block.text.strip()) and style.startswith(("Heading", "Title"))
        parts.append((("section", block.text.strip()) if is_heading else None, block.text))
        title = title or (block.text.strip() if is_heading else "")
    return _joined(title, parts, "\n")


def _joined(
    title: str, parts: list[tuple[tuple[str, str | int] | None, str]], between: str
) -> _Read:
    """Parts, each with what begins there, as one text."""
    marks, start = [], 0
    for begins, text in parts:
        if begins is not None:
            marks.append(Mark(start, *begins))
        start += len(text) + len(between)
    return _Read(title.strip(), between.join(text for _, text in parts), tuple(marks))


def _decoded(path: Path) -> str:
    """The text of a file: UTF-8, UTF-16 with its mark, or else Windows' Latin letters."""
    data = path.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        logger.warning("%s is not UTF-8 (byte %d); read as windows-1252", path, error.start)
        return data.decode("cp1252", "replace")


READERS: Mapping[str, Callable[[Path], _Read]] = {
    ".txt": lambda path: _Read("", _decoded(path)),
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".html": _read_html,
    ".htm": _read_html,
    ".pdf": _read_pdf,
    ".docx": _read_docx,
}
"""How each kind of document is read, by the end of its name."""

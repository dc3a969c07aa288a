"""Parses documents: .txt, .md, .html, .pdf and .docx files to text with a title and marks.

pypdf, python-docx and trafilatura read the formats; only this file imports them for documents.
``document_process.py`` calls it in a process with limits, since none of the three has any.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t#]*$")
_FENCE = re.compile(r"^\s{0,3}(```|~~~)")


@dataclass(frozen=True, slots=True)
class Mark:
    """A label from character ``start`` on: its ``name`` (page, section) and ``value``."""

    start: int
    name: str
    value: str | int


@dataclass(frozen=True, slots=True)
class DocumentText:
    """A file's contents: its title ("" if it has none), its text, and its marks."""

    title: str
    text: str
    marks: tuple[Mark, ...] = ()


def _read_markdown(path: Path) -> DocumentText:
    """The text unchanged; the first heading is the title, each heading begins a section."""
    text = _decoded(path)
    marks: list[Mark] = []
    start, is_code = 0, False
    for line in text.splitlines(keepends=True):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code and (heading := _HEADING.match(line.rstrip())):
            marks.append(Mark(start, "section", heading[1]))
        start += len(line)
    return DocumentText(str(marks[0].value) if marks else "", text, tuple(marks))


def _read_html(path: Path) -> DocumentText:
    """The readable text of a page, without menus and scripts."""
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    source = _decoded(path)
    about = trafilatura.extract_metadata(source)
    text = trafilatura.extract(source, favor_recall=True, include_comments=False)
    return DocumentText((about.title if about else "") or "", text or trafilatura.html2txt(source))


def _read_pdf(path: Path) -> DocumentText:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    with PdfReader(path) as reader:
        title = (reader.metadata.title if reader.metadata else "") or ""
        pages = [page.extract_text() for page in reader.pages]
    return _joined(title, [(("page", n), text) for n, text in enumerate(pages, start=1)], "\n\n")


def _read_docx(path: Path) -> DocumentText:
    """Paragraphs and tables in order; the styles Title and Heading N make sections."""
    import docx
    from docx.opc.exceptions import PackageNotFoundError
    from docx.table import Table

    try:
        document = docx.Document(str(path))
    except PackageNotFoundError as error:
        raise ValueError("it is not a .docx file, despite its name") from error
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
) -> DocumentText:
    marks, start = [], 0
    for begins, text in parts:
        if begins is not None:
            marks.append(Mark(start, *begins))
        start += len(text) + len(between)
    return DocumentText(title.strip(), between.join(text for _, text in parts), tuple(marks))


def _decoded(path: Path) -> str:
    """The text of a file: UTF-8, UTF-16 with its byte order mark, or otherwise windows-1252."""
    data = path.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        logger.warning("%s is not UTF-8 (byte %d); read as windows-1252", path, error.start)
        return data.decode("cp1252", "replace")


READERS: Mapping[str, Callable[[Path], DocumentText]] = {
    ".txt": lambda path: DocumentText("", _decoded(path)),
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".html": _read_html,
    ".htm": _read_html,
    ".pdf": _read_pdf,
    ".docx": _read_docx,
}
"""The reader of each document format, by file extension."""

"""Reads the chapters of an EPUB: its spine of XHTML files, in a zip file.

The maintained libraries for EPUB have copyleft licences. The format is zip, XML and HTML, for which
the standard library and lxml suffice. ``document_formats.py`` calls this in a process with limits.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree
from zipfile import ZipFile

from lxml import html
from lxml.etree import ParserError

logger = logging.getLogger(__name__)

_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_BLOCKS = {*_HEADINGS, *("p", "div", "section", "li", "tr", "blockquote", "pre", "br", "dt", "dd")}
# Line breaks in the source mean nothing; lxml refuses to write control characters.
_SPACES = re.compile(r"[\s\x00-\x1f\ufdd0\ufffe\uffff]+")
_BEGIN = "\ufdd0"  # marks each heading; no text contains this code point


def read_book(path: Path) -> tuple[str, list[tuple[str, str]]]:
    """The title of a book, and its sections: the heading ("" if it has none) and the text."""
    with ZipFile(path) as book:
        container = ElementTree.fromstring(book.read("META-INF/container.xml"))
        root = container.find(".//{*}rootfile")
        if root is None:
            raise ValueError("its container.xml names no package")
        name = root.get("full-path", "")
        package = ElementTree.fromstring(book.read(name))
        chapters = _chapters(package, posixpath.dirname(name))
        if not _encrypted(book).isdisjoint(chapters):
            raise ValueError("it is encrypted")
        found = [chapter for chapter in chapters if chapter in book.NameToInfo]
        if len(found) < len(chapters):
            logger.warning("%s lacks %d of its chapters", path, len(chapters) - len(found))
        parts = [part for chapter in found for part in _sections(book.read(chapter))]
    return package.findtext(".//{http://purl.org/dc/elements/1.1/}title", ""), parts


def _chapters(package: ElementTree.Element, folder: str) -> list[str]:
    """The names of the files in reading order, without the table of contents."""
    items = {item.get("id"): item for item in package.iterfind(".//{*}manifest/{*}item")}
    named = (each.get("idref") for each in package.iterfind(".//{*}spine/{*}itemref"))
    order = [items.get(name, ElementTree.Element("item")) for name in named]
    return [
        posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
        for item in order
        if "nav" not in item.get("properties", "").split()
    ]


def _encrypted(book: ZipFile) -> set[str]:
    """The names of encrypted files; most books encrypt nothing, or only fonts."""
    if "META-INF/encryption.xml" not in book.namelist():
        return set()
    tree = ElementTree.fromstring(book.read("META-INF/encryption.xml"))
    return {unquote(each.get("URI", "")) for each in tree.iterfind(".//{*}CipherReference")}


def _sections(chapter: bytes) -> list[tuple[str, str]]:
    if chapter[:2] in (b"\xff\xfe", b"\xfe\xff"):
        chapter = chapter.decode("utf-16").encode()
    # Deeper than 256 elements, lxml would drop the text without huge_tree.
    parser = html.HTMLParser(encoding="utf-8", huge_tree=True)
    try:
        body = html.document_fromstring(chapter, parser=parser).find("body")
    except ParserError:  # it has no element
        return []
    if body is None:
        return []
    for ignored in list(body.iter("script", "style")):
        ignored.drop_tree()
    for each in body.iter():
        space = " " if each.tag in ("td", "th") else "\n" if each.tag in _BLOCKS else ""
        each.text = space + _SPACES.sub(" ", each.text or "")
        each.tail = space + _SPACES.sub(" ", each.tail or "")
    headings = [""]
    for heading in body.iter(*_HEADINGS):
        headings.append(" ".join(heading.text_content().split()))
        heading.text = f"{_BEGIN}{heading.text}"
    lines = (" ".join(line.split()) for line in body.text_content().split("\n"))
    texts = "\n".join(filter(None, lines)).split(_BEGIN)
    pairs = zip(headings, map(str.strip, texts), strict=True)
    return [(heading, text) for heading, text in pairs if text]

"""Whole pages by address, for ``/access``: a pages jsonl and an index of where each page starts.

``open_pages`` indexes a file of ``{"url", "contents"}`` lines once (16 bytes a page, kept beside
the file) and maps both afterwards, so that a page costs a binary search and one line, however many
gigabytes there are. ``read_pages`` answers a request. Passages and searches are the index's, HTTP
is the server's, pages of the live web are ``forage.retrieval.web.web_pages``.
"""

from __future__ import annotations

import gzip
import json
import logging
import mmap
import os
import re
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, cast
from urllib.parse import unquote

import numpy as np
from pydantic import ValidationError

from forage.data.corpus import parse_object
from forage.errors import UserError
from forage.retrieval.index.index_files import (
    FileSum,
    check_file_sum,
    check_file_sums,
    sum_file,
)
from forage.retrieval.wire import AccessReply, AccessRequest, Page, PageChunk
from forage.settings import Strict

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
HASHES_FILE = "hashes.npy"
OFFSETS_FILE = "offsets.npy"
COPY_FILE = "pages.jsonl"

_GZIP_MAGIC = b"\x1f\x8b"
_TITLE_FOLLOWS = re.compile(r"(?:/w)?/index\.php(?:/|\?title=)|/wiki/")
_BOM = b"\xef\xbb\xbf"
_LOG_EVERY = 1_000_000


class Pages(Protocol):
    """Somewhere to look pages up; may be called from several threads."""

    def pages(self, urls: Sequence[str]) -> list[Page | None]:
        """The page behind each address, None where there is none; raises ``SourceError``."""
        ...

    def close(self) -> None:
        """Let go of files and connections; harmless when repeated."""
        ...


def read_pages(pages: Pages, request: AccessRequest) -> AccessReply:
    """Answer ``/access``: each address its page, in the order asked; raises ``SourceError``."""
    found = pages.pages(request.urls)
    if request.max_chars is None:
        return AccessReply(result=list(found))
    cut = [page and cut_page(page, request.chunk, request.max_chars) for page in found]
    return AccessReply(result=list(cut))


def cut_page(page: Page, chunk: int, max_chars: int) -> PageChunk:
    """Part ``chunk`` of ``page`` in parts of ``max_chars`` characters; all parts joined are it.

    ``abcde`` in parts of 2 is ``ab``, ``cd``, ``e``; an empty page has one empty part.
    """
    return PageChunk(
        url=page.url,
        contents=page.contents[chunk * max_chars : (chunk + 1) * max_chars],
        chunk=chunk,
        num_chunks=max(1, -(-len(page.contents) // max_chars)),
    )


def page_key(url: str) -> str:
    """What the spellings of one page's address share.

    MediaWiki's ``w/index.php/X``, ``w/index.php?title=X`` and ``wiki/X`` are one page, and in X
    ``%20``, ``_`` and a blank are one character.
    """
    wiki, *title = _TITLE_FOLLOWS.split(url.strip(), maxsplit=1)
    return f"{wiki}/wiki/{unquote(title[0]).replace('_', ' ')}" if title else wiki


class PagesManifest(Strict):
    """Which file an offset index was made of, so that a changed file is indexed anew.

    ``files`` are the sums of the index's own files, ``lines`` that of a plain file of pages.
    """

    format_version: int = FORMAT_VERSION
    source_bytes: int
    source_mtime_ns: int
    num_pages: int
    num_bytes: int
    files: dict[str, FileSum] | None = None
    lines: FileSum | None = None


def open_pages(path: Path, is_verified: bool = False) -> PageStore:
    """The pages of a jsonl file (gzip too), indexed first where that was not done yet.

    The index lies in ``<path>.index``; gzip is read once into a plain copy there. A file that has
    changed since is indexed again. ``is_verified`` reads every file to its end before it is
    trusted. Raises ``UserError`` (wrong lines are named by number).
    """
    index_dir = path.with_name(path.name + ".index")
    try:
        status = path.stat()
        is_gzip = _is_gzip(path)
    except OSError as error:
        raise UserError(f"cannot read the pages {path}: {error.strerror}; check the path") from None
    manifest = _read_manifest(index_dir)
    made_of = (status.st_size, status.st_mtime_ns, FORMAT_VERSION)
    if manifest is None or made_of != (
        manifest.source_bytes,
        manifest.source_mtime_ns,
        manifest.format_version,
    ):
        logger.info("indexing the pages of %s in %s", path, index_dir)
        manifest = _build(path, index_dir, status, is_gzip)
    lines = index_dir / COPY_FILE if is_gzip else path
    _check(lines, index_dir, manifest, is_verified)
    return PageStore(lines, index_dir, manifest)


def _check(lines: Path, index_dir: Path, manifest: PagesManifest, is_verified: bool) -> None:
    """Compare the files with their sums; raises ``UserError``."""
    if manifest.files is None:
        logger.warning(
            "%s has no checksums (an older version made it): remove it, and it is made again",
            index_dir,
        )
        return
    remedy = f"remove {index_dir}, and it is made again"
    check_file_sums(index_dir, manifest.files, is_verified, remedy)
    if manifest.lines is not None:
        check_file_sum(lines, manifest.lines, is_verified, "put the file back")


class PageStore:
    """An indexed pages file: a page by address, without reading the others.

    Safe to read from several threads. Use ``open_pages`` to make one.
    """

    def __init__(self, lines: Path, index_dir: Path, manifest: PagesManifest) -> None:
        """Map ``lines`` and its index; raises ``UserError`` if they do not belong together."""
        try:
            self._hashes = np.load(index_dir / HASHES_FILE, mmap_mode="r")
            self._offsets = np.load(index_dir / OFFSETS_FILE, mmap_mode="r")
            with lines.open("rb") as file:
                self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, EOFError, ValueError) as error:
            raise UserError(
                f"the page index in {index_dir} cannot be read ({error}); remove it, and it is "
                "made again"
            ) from error
        found = (len(self._hashes), len(self._offsets), len(self._lines))
        if found != (manifest.num_pages, manifest.num_pages, manifest.num_bytes):
            self.close()
            raise UserError(
                f"the page index in {index_dir} was made for {manifest.num_pages} pages in "
                f"{manifest.num_bytes} bytes, but holds {found[0]} addresses and {found[1]} "
                f"offsets for {found[2]} bytes; remove it, and it is made again"
            )

    def __len__(self) -> int:
        """Lines of the file; an address that stands on several counts each time."""
        return len(self._hashes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()

    def page(self, url: str) -> Page | None:
        """The page behind ``url``, or None; the last line wins where an address stands on several.

        An address with a ``#fragment`` that no line has names the page without it.
        """
        page = self._find(page_key(url))
        if page is None and "#" in url:
            page = self._find(page_key(url.partition("#")[0]))
        return page

    def pages(self, urls: Sequence[str]) -> list[Page | None]:
        """``page`` of each address, in the order asked."""
        return [self.page(url) for url in urls]

    def _find(self, key: str) -> Page | None:
        wanted = np.uint64(_hash(key))
        start = int(np.searchsorted(self._hashes, wanted, side="left"))
        end = int(np.searchsorted(self._hashes, wanted, side="right"))
        for place in range(end - 1, start - 1, -1):
            offset = int(self._offsets[place])
            line_end = self._lines.find(b"\n", offset)
            line = self._lines[offset : line_end if line_end >= 0 else None]
            row = json.loads(line.decode("utf-8"))
            if page_key(row["url"]) == key:
                return Page(
                    url=_without_surrogates(row["url"]),
                    contents=_without_surrogates(row["contents"]),
                )
        return None


def _build(path: Path, index_dir: Path, status: os.stat_result, is_gzip: bool) -> PagesManifest:
    """Index ``path`` beside ``index_dir`` and rename it into place; raises ``UserError``."""
    if index_dir.exists() and _read_manifest(index_dir) is None:
        raise UserError(
            f"{index_dir} exists and is not a page index; nothing was touched: remove it, or name "
            "another place for the index"
        )
    try:
        index_dir.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{index_dir.name}.", dir=index_dir.parent))
        try:
            manifest = _write_index(path, made, status, is_gzip)
            made.chmod(0o755)
            _put_in_place(made, index_dir, manifest)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write the page index {index_dir}: {error.strerror}; name another place for it"
        ) from error
    return manifest


def _put_in_place(made: Path, index_dir: Path, manifest: PagesManifest) -> None:
    shutil.rmtree(index_dir, ignore_errors=True)
    try:
        made.rename(index_dir)
    except OSError:
        if _read_manifest(index_dir) != manifest:  # else another process was a moment faster
            raise


def _write_index(path: Path, made: Path, status: os.stat_result, is_gzip: bool) -> PagesManifest:
    hashes, offsets = array("Q"), array("Q")
    copy = (made / COPY_FILE).open("wb") if is_gzip else None
    num_bytes = 0
    try:
        for number, offset, line in _read_lines(path, is_gzip):
            num_bytes += len(line)
            if copy is not None:
                copy.write(line)
            body = line.removeprefix(_BOM) if number == 1 else line
            if body.strip():
                hashes.append(_hash(page_key(_parse_line(body, path, number)["url"])))
                offsets.append(offset + len(line) - len(body))
                if len(hashes) % _LOG_EVERY == 0:
                    logger.info("%d pages so far", len(hashes))
    finally:
        if copy is not None:
            copy.close()
    if not hashes:
        raise UserError(f"the pages file {path} holds no page")
    # A stable sort keeps the lines of one address in the order of the file: the last one wins.
    order = np.argsort(np.frombuffer(hashes, dtype=np.uint64), kind="stable")
    np.save(made / HASHES_FILE, np.frombuffer(hashes, dtype=np.uint64)[order])
    np.save(made / OFFSETS_FILE, np.frombuffer(offsets, dtype=np.uint64)[order])
    own = [HASHES_FILE, OFFSETS_FILE, *([COPY_FILE] if is_gzip else [])]
    manifest = PagesManifest(
        files={name: sum_file(made / name) for name in own},
        lines=None if is_gzip else sum_file(path),
        source_bytes=status.st_size,
        source_mtime_ns=status.st_mtime_ns,
        num_pages=len(hashes),
        num_bytes=num_bytes,
    )
    (made / MANIFEST_FILE).write_text(manifest.model_dump_json() + "\n", encoding="utf-8")
    return manifest


def _read_manifest(index_dir: Path) -> PagesManifest | None:
    """The manifest of a finished index, or None: then it is made (again)."""
    try:
        return PagesManifest.model_validate_json((index_dir / MANIFEST_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == _GZIP_MAGIC


def _read_lines(path: Path, is_gzip: bool) -> Iterator[tuple[int, int, bytes]]:
    """Number (from 1), offset in the plain text and bytes (line break included) of each line."""
    number = offset = 0
    try:
        with cast(BinaryIO, gzip.open(path) if is_gzip else path.open("rb")) as lines:
            for number, line in enumerate(lines, start=1):
                yield number, offset, line
                offset += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: the gzip data ends or breaks after line {number} ({error}); "
            "download or write the file again"
        ) from error


def _parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    row = parse_object(line, path, number)
    for key in ("url", "contents"):
        if not isinstance(row.get(key), str):
            raise UserError(
                f'{path}:{number}: "{key}" is {str(row.get(key, "missing"))[:40]}; each line needs '
                '"url" and "contents", both texts'
            )
    return row


def _hash(key: str) -> int:
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _without_surrogates(text: str) -> str:
    """Lone surrogates (legal in JSON, not in UTF-8) as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")

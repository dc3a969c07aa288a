"""Whole pages by address, for ``/access``: a pages jsonl and an index of where each page starts.

``open_pages`` indexes a file of ``{"url", "contents"}`` lines once (16 bytes a page, kept beside
the file) and maps both afterwards, so that a page costs a binary search and one line, however many
gigabytes there are. ``read_pages`` answers a request. Passages and searches are the index's, HTTP
is the server's, pages of the live web are ``forage.retrieval.web.web_pages``.
"""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from forage.errors import UserError
from forage.retrieval.source import SourceError
from forage.retrieval.sources.page_index import (
    COPY_FILE,
    FORMAT_VERSION,
    HASHES_FILE,
    OFFSETS_FILE,
    PagesManifest,
    build_page_index,
    hash_of_key,
    is_gzip_file,
    page_key,
    read_page_manifest,
)
from forage.retrieval.store.index_files import DamagedFileError, OpenFiles, check_file_sums
from forage.retrieval.wire import AccessReply, AccessRequest, Page, PageChunk

logger = logging.getLogger(__name__)


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


def open_pages(path: Path, is_verified: bool = False) -> PageStore:
    """The pages of a jsonl file (gzip too), indexed first where that was not done yet.

    The index lies in ``<path>.index``; gzip is read once into a plain copy there. A file that has
    changed since is indexed again. ``is_verified`` reads every file to its end before it is
    trusted. Raises ``UserError`` (wrong lines are named by number).
    """
    index_dir = path.with_name(path.name + ".index")
    try:
        status = path.stat()
        is_gzip = is_gzip_file(path)
    except OSError as error:
        raise UserError(f"cannot read the pages {path}: {error.strerror}; check the path") from None
    manifest = read_page_manifest(index_dir)
    made_of = (status.st_size, status.st_mtime_ns, FORMAT_VERSION)
    if manifest is None or made_of != (
        manifest.source_bytes,
        manifest.source_mtime_ns,
        manifest.format_version,
    ):
        logger.info("indexing the pages of %s in %s", path, index_dir)
        manifest = build_page_index(path, index_dir, status, is_gzip)
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
        of_lines = {lines.name: manifest.lines}
        check_file_sums(lines.parent, of_lines, is_verified, "put the file back")


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
            self._lines.close()
            raise UserError(
                f"the page index in {index_dir} was made for {manifest.num_pages} pages in "
                f"{manifest.num_bytes} bytes, but holds {found[0]} addresses and {found[1]} "
                f"offsets for {found[2]} bytes; remove it, and it is made again"
            )
        self._files = OpenFiles((lines, index_dir / HASHES_FILE, index_dir / OFFSETS_FILE))

    def __len__(self) -> int:
        """Lines of the file; an address that stands on several counts each time."""
        return len(self._hashes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._files.close()

    def page(self, url: str) -> Page | None:
        """The page behind ``url``, or None; the last line wins where an address stands on several.

        An address with a ``#fragment`` that no line has names the page without it. Raises
        ``SourceError`` where a file was cut meanwhile: reading on would end the process.
        """
        try:
            self._files.check()
        except DamagedFileError as error:
            raise SourceError(str(error), is_temporary=False) from error
        page = self._find(page_key(url))
        if page is None and "#" in url:
            page = self._find(page_key(url.partition("#")[0]))
        return page

    def pages(self, urls: Sequence[str]) -> list[Page | None]:
        """``page`` of each address, in the order asked."""
        return [self.page(url) for url in urls]

    def _find(self, key: str) -> Page | None:
        wanted = np.uint64(hash_of_key(key))
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


def _without_surrogates(text: str) -> str:
    """Lone surrogates (legal in JSON, not in UTF-8) as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")

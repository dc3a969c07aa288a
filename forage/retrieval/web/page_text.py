"""Extracts the text of untrusted web pages with trafilatura.

Run as a program (``python -m forage.retrieval.web.page_text MEGABYTES``), it reads one page after
another from its standard input and writes their texts to its output, with limits on memory and on
the time per page: libxml2 has none, and two megabytes of ``<p>x`` take it a minute and 700 MB.
``forage.retrieval.web.extraction`` starts it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import struct
import sys
from dataclasses import asdict, dataclass
from typing import BinaryIO

import psutil

# Longer texts are truncated: no passage and no reader needs more.
MAX_TEXT_CHARS = 200_000

# The encodings of the web (https://encoding.spec.whatwg.org). Python has others, some quadratic
# (punycode, idna) or made to hide text (utf-7, unicode_escape).
CHARSETS = frozenset(
    """
    ascii us-ascii utf-8 utf8 utf-16 utf-16le utf-16be latin1 latin-1 macintosh
    iso-8859-1 iso-8859-2 iso-8859-3 iso-8859-4 iso-8859-5 iso-8859-6 iso-8859-7 iso-8859-8
    iso-8859-9 iso-8859-10 iso-8859-13 iso-8859-14 iso-8859-15 iso-8859-16
    windows-1250 windows-1251 windows-1252 windows-1253 windows-1254 windows-1255
    windows-1256 windows-1257 windows-1258 koi8-r koi8-u ibm866 tis-620
    gb2312 gbk gb18030 big5 big5-hkscs euc-jp iso-2022-jp shift_jis shift-jis euc-kr ks_c_5601-1987
    """.split()
)

# trafilatura loads much of its code with its first page; a real page should not pay for that.
_FIRST_PAGE = b"<html><body><article><p>A first page, of no interest.</p></article></body></html>"

LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetched page: its body up to the size limit, and the charset it declares."""

    url: str
    body: bytes
    is_html: bool
    charset: str | None


@dataclass(frozen=True, slots=True)
class TextReply:
    """The text of a page, or the reason why there is none; after ``is_last`` the program ends."""

    text: str | None = None
    error: str = ""
    is_last: bool = False


class ExtractionError(Exception):
    """Raised if the extractor fails on a page."""


class TextExtractor:
    """Extracts what a person would read on a page."""

    def __init__(self) -> None:
        """Loads trafilatura, which takes half a second and needs an extra."""
        import trafilatura

        logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # bad pages are common
        self._extract = trafilatura.extract

    def text(self, page: Fetched) -> str:
        """The readable text ("" if there is none); raises ``ExtractionError``."""
        source = decode(page.body, page.charset)
        if page.is_html:
            try:
                text = self._extract(source, url=page.url, include_comments=False) or ""
            except Exception as error:  # its input is untrusted
                raise ExtractionError(f"{type(error).__name__}: {error}"[:200]) from error
        else:
            text = source if isinstance(source, str) else source.decode("utf-8", "replace")
        return text[:MAX_TEXT_CHARS].strip()


def decode(body: bytes, charset: str | None) -> str | bytes:
    """The text in the declared charset; bytes if the web's standard lacks that charset."""
    if charset is None or charset.strip().lower() not in CHARSETS:
        return body  # trafilatura guesses the charset
    return body.decode(charset.strip().lower(), "replace")


def pack_request(page: Fetched, timeout_s: float) -> bytes:
    """A page and its time limit, as written to the program."""
    about = {"url": page.url, "is_html": page.is_html, "charset": page.charset}
    header = json.dumps(about | {"timeout_s": timeout_s}).encode()
    return b"".join([LENGTH.pack(len(header)), header, LENGTH.pack(len(page.body)), page.body])


def serve_texts(requests: BinaryIO, replies: BinaryIO, max_mb: int) -> None:
    """Replies until the input ends, or a page leaves too much memory in use."""
    extractor = TextExtractor()
    extractor.text(Fetched("", _FIRST_PAGE, is_html=True, charset=None))
    _write(replies, TextReply())  # ready
    reply = TextReply()
    while not reply.is_last and (header := _read(requests)) is not None:
        about = json.loads(header)
        # The kernel ends this process when its CPU time is used up, even inside libxml2 or after
        # the parent has exited.
        timeout_s = about.pop("timeout_s")
        page = Fetched(body=_read(requests) or b"", **about)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        reply = _answer(extractor, page, max_mb)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, reply)


def _answer(extractor: TextExtractor, page: Fetched, max_mb: int) -> TextReply:
    text, error = None, ""
    try:
        text = extractor.text(page)
    except (ExtractionError, MemoryError) as failure:
        error = str(failure) or type(failure).__name__
    kept_mb = psutil.Process().memory_info().rss / 2**20
    return TextReply(text, error, is_last=kept_mb > max_mb / 2)


def _read(file: BinaryIO) -> bytes | None:
    length = file.read(LENGTH.size)
    return file.read(LENGTH.unpack(length)[0]) if length else None


def _write(file: BinaryIO, reply: TextReply) -> None:
    data = json.dumps(asdict(reply)).encode()
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


def main(max_mb: int) -> None:
    """Serves texts on standard input and output; discards what libraries print."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    with contextlib.suppress(ValueError):  # macOS has no such limit; the time limit applies there
        resource.setrlimit(resource.RLIMIT_AS, (max_mb * 2**20, max_mb * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    serve_texts(sys.stdin.buffer, replies, max_mb)


if __name__ == "__main__":
    main(int(sys.argv[1]))

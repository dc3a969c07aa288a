"""Downloads large files over HTTP: resumed by byte range, verified by hash, written atomically.

A file may be published in pieces (``part_aa``, ``part_ab``), which are joined as they arrive.
Received bytes are in ``NAME.partial``. A resumed download hashes the bytes of the unfinished piece,
requests the rest, and renames the file once every piece is verified.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from forage.errors import UserError

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

LOG = logging.getLogger(__name__)

_CHUNK_BYTES = 2**20
_TIMEOUT_S = 60.0
_MAX_TRIES = 6
"""Consecutive attempts without a byte received; any byte resets the count."""

# Worth a retry: other refusals would only be repeated.
_PASSING_STATUSES = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole file, or a part of one: its address, its length and its hash.

    ``sha1`` is git's hash of the content, which the hub publishes for small files. Exactly one of
    the two hashes is set.
    """

    url: str
    num_bytes: int
    sha256: str = ""
    sha1: str = ""

    def new_digest(self) -> Hash:
        if self.sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False)


class _Interrupted(Exception):
    """An attempt ended before the end of the piece; a retry may get the rest."""


def download(
    pieces: Sequence[Piece],
    target: Path,
    on_bytes: Callable[[int], None] = lambda _: None,
    first_wait_s: float = 1.0,
) -> None:
    """Downloads ``pieces``, end to end, into ``target``; does nothing if that exists already.

    ``on_bytes`` is called with each number of bytes found on disk or received. After an attempt
    without a byte it waits, twice as long each time. Raises ``UserError`` if the server refuses, a
    checksum differs, or the disk is full.
    """
    num_bytes = sum(piece.num_bytes for piece in pieces)
    if target.exists():
        if target.stat().st_size != num_bytes:
            raise UserError(
                f"{target} already exists with {target.stat().st_size:,} bytes, but the published "
                f"file has {num_bytes:,}; move it away, or choose another --out"
            )
        on_bytes(num_bytes)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.touch()
    if partial.stat().st_size > num_bytes:  # from another file: no piece of this one was verified
        partial.write_bytes(b"")
    _check_room(partial, num_bytes)
    try:
        with partial.open("r+b") as file:
            start = 0
            for piece in pieces:
                _fetch_piece(piece, file, start, on_bytes, first_wait_s)
                start += piece.num_bytes
            file.truncate(start)
    except OSError as error:
        raise UserError(
            f"cannot write {partial}: {error.strerror or error}; received bytes are kept: free "
            "some space and run the same command again"
        ) from error
    partial.replace(target)


def _fetch_piece(
    piece: Piece, file: BinaryIO, start: int, on_bytes: Callable[[int], None], first_wait_s: float
) -> None:
    """Completes and verifies the piece at ``start``; raises ``UserError``."""
    end = start + piece.num_bytes
    num_there = file.seek(0, 2)
    if num_there > end:  # a later piece was begun, so this one was verified
        on_bytes(piece.num_bytes)
        return
    digest = piece.new_digest()
    file.seek(start)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        on_bytes(len(chunk))
    num_failed = 0
    while file.tell() < end:
        before, reason = file.tell(), "the connection ended early"
        try:
            for chunk in _receive(piece, before - start):
                file.write(chunk)
                digest.update(chunk)
                on_bytes(len(chunk))
        except _Interrupted as error:
            reason = str(error)
        if file.tell() == end:
            break
        num_failed = 0 if file.tell() > before else num_failed + 1
        if num_failed == _MAX_TRIES:
            raise UserError(
                f"{piece.url}: {reason}, {_MAX_TRIES} times in a row; received bytes are kept: "
                "run the same command again"
            )
        LOG.warning("%s: %s; continuing at byte %d", piece.url, reason, file.tell() - start)
        time.sleep(first_wait_s * 2 ** max(num_failed - 1, 0))
    wanted = piece.sha256 or piece.sha1
    if digest.hexdigest() != wanted:
        file.truncate(start)
        raise UserError(
            f"{piece.url}: its checksum is {digest.hexdigest()}, but the published one is "
            f"{wanted}; the piece was removed: run the same command again, or use another mirror"
        )


def _receive(piece: Piece, num_there: int) -> Iterator[bytes]:
    """The bytes of a piece after the first ``num_there``, as far as one request delivers them."""
    request = urllib.request.Request(piece.url, headers={"Range": f"bytes={num_there}-"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            has_range = reply.status == 206
            sent = reply.headers.get("Content-Range") or ""
            if has_range and not sent.startswith(f"bytes {num_there}-"):
                raise _Interrupted("the server sent a different range from the one requested")
            # A server without ranges sends everything; the bytes we already have are skipped.
            num_to_skip = 0 if has_range else num_there
            num_left = piece.num_bytes - num_there
            while num_left > 0 and (chunk := reply.read1(_CHUNK_BYTES)):
                kept = chunk[num_to_skip:][:num_left]
                num_to_skip = max(0, num_to_skip - len(chunk))
                num_left -= len(kept)
                yield kept
    except urllib.error.HTTPError as error:
        if error.code not in _PASSING_STATUSES:
            raise UserError(
                f"{piece.url}: the server answers {error.code} {error.reason}; check the address"
            ) from error
        raise _Interrupted(f"the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise _Interrupted(str(reason) or type(error).__name__) from error


def _check_room(partial: Path, num_bytes: int) -> None:
    num_needed = num_bytes - partial.stat().st_size
    num_free = shutil.disk_usage(partial.parent).free
    if num_needed > num_free:
        raise UserError(
            f"{partial.parent} has {num_free / 1e9:.1f} GB free, but {num_needed / 1e9:.1f} GB "
            "are still to be downloaded; free some space, or choose another --out"
        )

"""The corpus: passages read from and written to jsonl, and a store that finds one by row or id.

``read_corpus`` streams any corpus that Search-R1 and its reproductions use: jsonl, gzip too, in
one file or several. ``CorpusStore`` is the uncompressed copy of such a corpus that an index keeps:
memory-mapped, with an offset per row, so that a passage costs one seek, however large the corpus
is. Nothing here knows how passages are searched.
"""

from __future__ import annotations

import gzip
import json
import mmap
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np

from forage.errors import UserError
from forage.types import Passage

LINES_FILE = "corpus.jsonl"
OFFSETS_FILE = "corpus.offsets.npy"
BUCKETS_FILE = "corpus.id_buckets.npy"
ROWS_FILE = "corpus.id_rows.npy"

_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK_BYTES = 2**22
# NaN and Infinity are Python's, not JSON's: no reply could hold them.
_JSON = json.JSONDecoder(parse_constant=lambda _: None)

_NEEDED = (
    'each line needs "id" and "contents" (or "title" and "text"), such as '
    '{"id": "a1", "title": "Ada", "text": "Born in 1815."}'
)


def format_contents(passage: Passage) -> str:
    """The ``contents`` of a corpus line: the title in quotes, a line break, the text."""
    return f'"{passage.title}"\n{passage.text}'


def parse_contents(contents: str) -> tuple[str, str]:
    """Title and text of ``contents``; the title's quotes are optional.

    ``'"Ada"\\nBorn 1815.'`` and ``'Ada\\nBorn 1815.'`` give ``("Ada", "Born 1815.")``; a single
    line without quotes is all text.
    """
    first, line_break, text = contents.partition("\n")
    title = first.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        return title[1:-1], text
    return (title, text) if line_break else ("", contents)


def read_corpus(path: Path) -> Iterator[Passage]:
    """The passages of a corpus; raises ``UserError`` with the line number.

    A corpus is a jsonl file, plain or gzip, or a directory of such files, read by name.
    """
    for block in line_blocks(path):
        yield from block.passages()


def write_corpus(path: Path, passages: Iterable[Passage]) -> None:
    """Write passages as jsonl that ``read_corpus`` reads back equal (gzip where it ends in .gz)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # mtime=0: the same passages give the same bytes, whenever they are written.
    file = gzip.GzipFile(path, "wb", mtime=0) if path.suffix == ".gz" else path.open("wb")
    with cast(BinaryIO, file) as out:
        for passage in passages:
            if "\n" in passage.title:
                raise UserError(
                    f"passage {passage.id!r}: its title holds a line break ({passage.title!r}), "
                    "which a corpus line cannot express; put the title on one line"
                )
            row = {"id": passage.id, "contents": format_contents(passage), **passage.fields}
            out.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")


def corpus_files(path: Path) -> list[Path]:
    """The files that a corpus is made of; raises ``UserError`` for a directory without any."""
    if not path.is_dir():
        return [path]
    files = sorted(f for f in path.iterdir() if f.name.endswith((".jsonl", ".jsonl.gz")))
    if not files:
        raise UserError(f"the directory {path} holds no .jsonl or .jsonl.gz file")
    return files


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Lines of one file, stripped and none of them blank.

    ``first_row`` is the row of the first; ``numbers`` are where each stands in its file, from 1.
    """

    file: Path
    first_row: int
    numbers: list[int]
    lines: list[bytes]

    def passages(self) -> Iterator[Passage]:
        """The passage on each line; raises ``UserError`` with the line number."""
        places = enumerate(zip(self.numbers, self.lines, strict=True), self.first_row)
        return (parse_line(line, self.file, number, row) for row, (number, line) in places)


def line_blocks(path: Path) -> Iterator[LineBlock]:
    """The lines of a corpus, some megabytes at a time; raises ``UserError`` behind what it read."""
    row = 0
    for file in corpus_files(path):
        reading, failure = file_lines(file), None
        while failure is None:
            numbers: list[int] = []
            lines: list[bytes] = []
            num_bytes = 0
            try:
                for number, line in reading:
                    numbers.append(number)
                    lines.append(line)
                    num_bytes += len(line)
                    if num_bytes >= _BLOCK_BYTES:
                        break
            except UserError as error:
                failure = error
            if lines:
                yield LineBlock(file, row, numbers, lines)
                row += len(lines)
            elif failure is None:
                break
        if failure is not None:
            raise failure


def file_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with path.open("rb") as raw:
            is_gzip = raw.peek(2)[:2] == _GZIP_MAGIC  # consumes nothing, so a pipe works too
            lines = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            for number, line in enumerate(cast(Iterable[bytes], lines), start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if stripped := line.strip():
                    yield number, stripped
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: the gzip data ends or breaks after line {number} ({error}); "
            "download or write the file again"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read the corpus {path}: {reason}; check the path") from error


def parse_line(line: bytes, path: Path, number: int, index: int) -> Passage:
    """The passage on a line: ``id`` and ``contents``, or ``id`` and ``text`` with a ``title``.

    ASearcher's rows have ``url`` and no ``id``; their id is the address and the row's index. What
    a line holds beside ``id`` and ``contents`` are the passage's fields.
    """
    row = parse_object(line, path, number)
    identity = row.get("id")
    if "id" not in row and isinstance(row.get("url"), str):
        identity = f"{row['url']}#{index}"
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        wrong = _what_is_wrong(row, "id", "a text or whole number")
        raise UserError(f"{path}:{number}: {wrong}; {_NEEDED}")
    contents, text, title = row.get("contents"), row.get("text"), row.get("title")
    if isinstance(text, str) and isinstance(title, str):
        pass
    elif isinstance(contents, str):
        title, text = parse_contents(contents)
    elif isinstance(text, str) and title is None:
        title = ""
    else:
        raise UserError(f"{path}:{number}: {_what_is_wrong(row, 'contents', 'a text')}; {_NEEDED}")
    row.pop("id", None)
    row.pop("contents", None)
    return Passage(
        replace_surrogates(str(identity)), replace_surrogates(title), replace_surrogates(text), row
    )


def parse_object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The JSON object on a line; raises ``UserError`` that names the line."""
    try:
        row = _JSON.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}:{number}: not UTF-8 at byte {error.start}; convert the file to UTF-8"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(
            f"{path}:{number}: holds a {type(row).__name__}; a JSON object is needed on each line"
        )
    return cast(dict[str, Any], row)


def _what_is_wrong(row: dict[str, Any], key: str, needed: str) -> str:
    if key not in row:
        return f'"{key}" is missing (the line has {", ".join(sorted(row)) or "no keys"})'
    return f'"{key}" is {str(row[key])[:40]!r}; {needed} is needed'


def replace_surrogates(text: str) -> str:
    """``text`` with lone surrogates (legal in JSON, not in UTF-8) replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(frozen=True, slots=True)
class StoredCorpus:
    """What ``build_store`` wrote: the number of passages, and the copy's size and hash."""

    num_passages: int
    num_bytes: int
    sha256: str


def build_store(
    corpus: Path, directory: Path, on_passage: Callable[[Passage], None] = lambda _: None
) -> StoredCorpus:
    """Copy ``corpus`` uncompressed into ``directory``, with offsets and ids; raises ``UserError``.

    ``on_passage`` is called with each passage, in row order.
    """
    blocks = line_blocks(corpus)
    return write_store(corpus, directory, ((one, hash_ids(one, on_passage)) for one in blocks))


def hash_ids(block: LineBlock, on_passage: Callable[[Passage], None]) -> array[int]:
    """What ``write_store`` wants of a block: the hash of each id; raises ``UserError``.

    ``on_passage`` is called with each passage.
    """
    hashes = array("Q")
    for passage in block.passages():
        hashes.append(_hash_id(passage.id))
        on_passage(passage)
    return hashes


def write_store(
    corpus: Path, directory: Path, blocks: Iterable[tuple[LineBlock, array[int]]]
) -> StoredCorpus:
    """``build_store`` of blocks of lines whose ids are hashed, in row order."""
    offsets, hashes, numbers = array("Q", [0]), array("Q"), array("Q")
    first_rows: dict[Path, int] = {}
    digest = sha256()
    with (directory / LINES_FILE).open("wb") as out:
        for block, block_hashes in blocks:
            first_rows.setdefault(block.file, block.first_row)
            lines = b"\n".join(block.lines) + b"\n"
            out.write(lines)
            digest.update(lines)
            ends = accumulate((len(line) + 1 for line in block.lines), initial=offsets.pop())
            offsets.extend(ends)
            hashes.extend(block_hashes)
            numbers.extend(block.numbers)
    if not hashes:
        raise UserError(f"the corpus {corpus} holds no passage")
    np.save(directory / OFFSETS_FILE, np.frombuffer(offsets, dtype=np.uint64))
    _save_id_table(np.frombuffer(hashes, dtype=np.uint64), directory)
    with CorpusStore(directory) as store:
        store.refuse_repeated_ids(hashes, first_rows, numbers)
    return StoredCorpus(len(hashes), offsets[-1], digest.hexdigest())


def _hash_id(identity: str) -> int:
    return int.from_bytes(blake2b(identity.encode("utf-8"), digest_size=8).digest(), "little")


def _save_id_table(hashes: np.ndarray, directory: Path) -> None:
    """Rows sorted by the bucket of their id, and where each bucket starts (one row on average)."""
    num_rows = len(hashes)
    buckets = hashes % np.uint64(num_rows)
    rows = np.argsort(buckets, kind="stable")
    starts = np.searchsorted(buckets[rows], np.arange(num_rows + 1, dtype=np.uint64))
    np.save(directory / ROWS_FILE, rows.astype(np.uint64))
    np.save(directory / BUCKETS_FILE, starts.astype(np.uint64))


class CorpusStore:
    """A corpus on disk: a passage by row or by id in O(1), without reading the rest.

    Safe to read from several threads. Use ``build_store`` to make one.
    """

    def __init__(self, directory: Path) -> None:
        """Map the files of ``directory``; raises ``UserError`` if they do not fit together."""
        self._path = directory / LINES_FILE
        try:
            self._offsets = np.load(directory / OFFSETS_FILE, mmap_mode="r")
            self._bucket_starts = np.load(directory / BUCKETS_FILE, mmap_mode="r")
            self._id_rows = np.load(directory / ROWS_FILE, mmap_mode="r")
            with self._path.open("rb") as file:
                self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, EOFError, ValueError) as error:
            raise UserError(
                f"the corpus store in {directory} cannot be read ({error}); build the index again"
            ) from error
        num_rows = len(self._offsets) - 1
        if int(self._offsets[-1]) != len(self._lines) or len(self._id_rows) != num_rows:
            raise UserError(
                f"{self._path} is {len(self._lines)} bytes, but its offsets describe "
                f"{int(self._offsets[-1])} bytes and its ids {len(self._id_rows)} of {num_rows} "
                "passages; build the index again"
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()

    def passage(self, row: int) -> Passage:
        """The passage at ``row`` (0 <= row < len)."""
        assert 0 <= row < len(self), f"row {row} is outside a corpus of {len(self)} passages"
        line = self._lines[int(self._offsets[row]) : int(self._offsets[row + 1])]
        return parse_line(line.strip(), self._path, row + 1, row)

    def row_of(self, identity: str) -> int | None:
        """The row of the passage with this id, or None."""
        bucket = _hash_id(identity) % len(self)
        start, end = int(self._bucket_starts[bucket]), int(self._bucket_starts[bucket + 1])
        for row in self._id_rows[start:end].tolist():
            if self.passage(row).id == identity:
                return row
        return None

    def by_id(self, identity: str) -> Passage | None:
        """The passage with this id, or None."""
        row = self.row_of(identity)
        return None if row is None else self.passage(row)

    def __iter__(self) -> Iterator[Passage]:
        return (self.passage(row) for row in range(len(self)))

    def refuse_repeated_ids(
        self, hashes: array[int], first_rows: dict[Path, int], numbers: array[int]
    ) -> None:
        """Raise ``UserError`` for an id that two lines share; files begin at ``first_rows``."""
        by_hash = np.argsort(np.frombuffer(hashes, dtype=np.uint64), kind="stable")
        ordered = np.frombuffer(hashes, dtype=np.uint64)[by_hash]
        for place in np.flatnonzero(ordered[1:] == ordered[:-1]).tolist():
            first, second = int(by_hash[place]), int(by_hash[place + 1])
            identity = self.passage(second).id
            if self.passage(first).id == identity:
                of_first, of_second = (_file_of(row, first_rows) for row in (first, second))
                other = "" if of_first == of_second else f" of {of_first}"
                raise UserError(
                    f"{of_second}:{numbers[second]}: the id {identity!r} is already that of line "
                    f"{numbers[first]}{other}; ids must be unique"
                )


def _file_of(row: int, first_rows: dict[Path, int]) -> Path:
    """The file that a row came from, given the first row of each."""
    return next(file for file, first in reversed(first_rows.items()) if first <= row)

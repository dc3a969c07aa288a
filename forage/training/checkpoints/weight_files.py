"""Files of weights that several processes write at once, each the pieces that it holds.

The format is that of https://huggingface.co/docs/safetensors: a header that says where each tensor
lies, then the tensors. Where a tensor lies follows from names and shapes alone, so ranks write
their rows of it side by side, and nobody gathers what others hold. One process writes whole tensors
in the same way.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SHARD_BYTES = 4 << 30
"""The most bytes of weights in one file, unless a single tensor has more."""
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MOST_AT_ONCE = 1 << 30
"""Bytes of one write: the kernel takes no more than two gigabytes."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """A part of a weight: ``values`` begin at ``starts``, an index for each dimension."""

    name: str
    starts: Shape
    values: Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a whole tensor lies in its file."""

    start: int
    dtype: torch.dtype
    shape: Shape


def shards(stem: str, num_bytes: Mapping[str, int]) -> dict[str, list[str]]:
    """The names of weights in each file, filled in order; ``num_bytes`` is the size of each."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in num_bytes.items():
        if files[-1] and filled + size > SHARD_BYTES:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {f"{stem}.safetensors": files[0]}
    return {f"{stem}-{i:05d}-of-{len(files):05d}.safetensors": f for i, f in enumerate(files, 1)}


def write_index(
    folder: Path, stem: str, files: Mapping[str, list[str]], num_bytes: Mapping[str, int]
) -> None:
    """Write which file holds which weight, where there are several files."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(num_bytes.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def header_of(tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and where each of them begins in the file.

    Larger numbers come first, so that each tensor begins at a multiple of its numbers' size.
    """
    sizes = [dtype.itemsize for dtype, _ in tensors.values()]
    assert sizes == sorted(sizes, reverse=True), "the caller sorts them: they lie in this order"
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        starts[name] = end
        end += torch.Size(shape).numel() * dtype.itemsize
        offsets = [starts[name], end]
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return whole, {name: len(whole) + start for name, start in starts.items()}


class WeightFiles:
    """The files of some weights in a folder, of which every process knows the same layout."""

    def __init__(
        self,
        folder: Path,
        stem: str,
        weights: Iterable[tuple[str, Tensor]],
        in_one_file: bool = False,
    ) -> None:
        """``weights`` may be cut over ranks, or have no numbers at all: shapes and types count."""
        self._folder, self._stem = folder, stem
        tensors = {name: (each.dtype, tuple(each.shape)) for name, each in weights}
        self._num_bytes = {
            name: torch.Size(shape).numel() * dtype.itemsize
            for name, (dtype, shape) in tensors.items()
        }
        self._files = shards(stem, self._num_bytes)
        if in_one_file:
            self._files = {f"{stem}.safetensors": list(tensors)}
        self._headers: dict[Path, bytes] = {}
        self._places: dict[str, tuple[Path, _Place]] = {}
        for file, unsorted in self._files.items():
            path = folder / file
            names = sorted(unsorted, key=lambda name: -tensors[name][0].itemsize)
            self._headers[path], starts = header_of({name: tensors[name] for name in names})
            for name in names:
                self._places[name] = (path, _Place(starts[name], *tensors[name]))

    def write_headers(self) -> None:
        """What one of the processes writes, before or after the others write their pieces."""
        write_index(self._folder, self._stem, self._files, self._num_bytes)
        for path, header in self._headers.items():
            with _open_to_write(path) as file:
                _write_at(file, header, 0)

    def write(self, pieces: Iterable[WeightPiece]) -> None:
        """Write pieces to their places, to the disk; raises ``OSError``."""
        with ExitStack() as stack:
            files: dict[Path, int] = {}
            for piece in pieces:
                path, place = self._places[piece.name]
                if path not in files:
                    files[path] = stack.enter_context(_open_to_write(path))
                for offset, values in _runs(piece, place):
                    data = values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                    _write_at(files[path], data, offset)
            for file in files.values():
                os.fsync(file)


def _runs(piece: WeightPiece, place: _Place) -> Iterable[tuple[int, Tensor]]:
    """The parts of a piece that lie in one run, and where they begin in the file."""
    size, values = place.dtype.itemsize, piece.values
    if tuple(values.shape[1:]) == place.shape[1:]:
        row = torch.Size(place.shape[1:]).numel()
        first = piece.starts[0] if piece.starts else 0
        yield place.start + first * row * size, values
        return
    assert values.ndim == 2, "only matrices are cut by columns"
    for index, row in enumerate(values, piece.starts[0]):
        yield place.start + (index * place.shape[1] + piece.starts[1]) * size, row


@contextmanager
def _open_to_write(path: Path) -> Iterator[int]:
    """The file as it is, made where it is missing: another process may have begun it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """All of ``data``; a single write may take less.

    A machine that writes to NFS completes the page that it begins or ends in with zeros, over what
    another machine has written there, unless it holds a lock on what it writes.
    """
    rest = memoryview(data)
    with suppress(OSError):  # a file system without locks
        fcntl.lockf(file, fcntl.LOCK_EX, len(rest), offset)
    while rest:
        written = os.pwrite(file, rest[:_MOST_AT_ONCE], offset)
        rest, offset = rest[written:], offset + written

"""Reads torch's distributed checkpoints (``.metadata``, ``*.distcp``) one tensor at a time.

``.metadata`` says which bytes of which file hold which chunk of which tensor; each chunk is a
separate ``torch.save`` file. torch's own loader fills the tensors of an existing state dict; this
one reads single tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forage.errors import UserError
from forage.training.layouts.stored import Shape, Stored, Weights, pieced_together
from forage.training.layouts.torch_file import Inert, Span, load_pickle, load_torch_file

METADATA = ".metadata"


def read_distributed(directory: Path) -> Weights:
    """All tensors of the checkpoint by name; raises ``UserError`` for damaged or missing files."""
    path = directory / METADATA
    metadata = load_pickle(path)
    tensors = metadata.get("state_dict_metadata") if isinstance(metadata, Inert) else None
    stretches = metadata.get("storage_data") if isinstance(metadata, Inert) else None
    if not (isinstance(tensors, dict) and isinstance(stretches, dict)):
        raise UserError(f"{path} is not the metadata of a distributed checkpoint")
    try:
        spans = {_place(index): _span(directory, info) for index, info in stretches.items()}
        found = {name: _tensor(name, about, spans) for name, about in tensors.items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} has metadata that cannot be read ({error!r})") from error
    _check_files(spans.values())
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _check_files(spans: Iterable[Span]) -> None:
    """Raises ``UserError`` if a file, or the end of one, is missing."""
    ends: dict[Path, int] = {}
    for span in spans:
        ends[span.path] = max(ends.get(span.path, 0), span.start + (span.num_bytes or 0))
    for path, end in sorted(ends.items()):
        if not path.is_file():
            raise UserError(f"{path} is missing: the checkpoint is incomplete")
        if path.stat().st_size < end:
            raise UserError(f"{path} is truncated: it has {path.stat().st_size} of {end} bytes")


def _place(index: Inert) -> tuple[str, Shape | None]:
    """A chunk's tensor and its offsets in that tensor."""
    offset = index.get("offset")
    return index.get("fqn"), None if offset is None else tuple(offset)


def _span(directory: Path, info: Inert) -> Span:
    if info.get("transform_descriptors"):
        raise UserError(f"{directory} has transformed (compressed) chunks, which are not supported")
    return Span(directory / info.get("relative_path"), info.get("offset"), info.get("length"))


def _tensor(name: str, about: Inert, spans: dict[tuple[str, Shape | None], Span]) -> Stored | None:
    """A tensor made of chunks; None if the entry is not a tensor."""
    chunks = about.get("chunks")
    if chunks is None:
        return None
    properties = about.get("properties")
    is_tuple = isinstance(properties.state, tuple)
    dtype = properties.state[0] if is_tuple else properties.get("dtype")
    shape = tuple(about.get("size"))
    pieces: list[tuple[Shape, Stored]] = []
    for chunk in chunks:
        offsets, sizes = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
        if prod(sizes):
            pieces.append((offsets, _chunk(name, spans[name, offsets], sizes, dtype)))
    if sum(prod(piece.shape) for _, piece in pieces) < prod(shape):
        raise UserError(
            f"the checkpoint's chunks of {name} do not cover its shape {shape}; a file is "
            "missing or damaged: copy the checkpoint again"
        )
    return pieced_together(shape, dtype, pieces)


def _chunk(name: str, span: Span, sizes: Shape, dtype: torch.dtype) -> Stored:
    def read_rows(first: int, end: int) -> Tensor:
        stored: Any = load_torch_file(span)
        is_right = isinstance(stored, Stored) and (stored.shape, stored.dtype) == (sizes, dtype)
        if not is_right:
            raise UserError(
                f"{span.path}: the chunk of {name} at byte {span.start} is not a tensor of shape "
                f"{sizes} and type {dtype}; the file is damaged: copy the checkpoint again"
            )
        return stored.read_rows(first, end)

    return Stored(sizes, dtype, read_rows)

"""Weights in one file a rank, cut over ranks as torch's DTensors: veRL's checkpoints of FSDP.

``model_world_size_W_rank_R.pt`` holds rank R's part of every tensor, with how it is cut: into
nearly equal parts along a dimension (``Shard``), or whole on each rank (``Replicate``), for each
dimension of the mesh of ranks. Plain tensors (buffers) are the same on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path

from forage.errors import UserError
from forage.training.layouts.stored import Shape, Stored, Weights, pieced_together
from forage.training.layouts.torch_file import CutTensor, Inert, Span, load_torch_file

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def rank_files(directory: Path) -> list[Path]:
    """The files of all ranks, in order; none in another directory. Raises ``UserError``."""
    found = {path: m for path in directory.glob("*.pt") if (m := _FILE.fullmatch(path.name))}
    if not found:
        return []
    sizes = {int(match[1]) for match in found.values()}
    if len(sizes) > 1:
        raise UserError(f"{directory} holds files of several world sizes: {sorted(sizes)}")
    (size,) = sizes
    wanted = [directory / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]
    for path in wanted:
        if path not in found:
            raise UserError(f"{path} is missing: the checkpoint is of {size} ranks")
    return wanted


def read_rank_files(paths: Sequence[Path]) -> Weights:
    """The weights by name, joined from their parts; raises ``UserError``."""
    ranks = [load_torch_file(Span(path)) for path in paths]
    for path, rank in zip(paths, ranks, strict=True):
        if not isinstance(rank, dict) or rank.keys() != ranks[0].keys():
            raise UserError(f"{path} does not hold the same names as {paths[0]}")
    joined: dict[str, Stored] = {}
    for name, first in ranks[0].items():
        if isinstance(first, Stored):
            joined[name] = first
        elif isinstance(first, CutTensor):
            parts = [rank[name] for rank in ranks]
            if not all(isinstance(part, CutTensor) for part in parts):
                raise UserError(f"{paths[0].parent}: {name} is cut on some ranks alone")
            joined[name] = _join(name, parts, paths)
        else:
            raise UserError(f"{paths[0]}: {name} is neither a tensor nor a part of one")
    return joined


def _join(name: str, parts: Sequence[CutTensor], paths: Sequence[Path]) -> Stored:
    whole = parts[0]
    mesh = _mesh_shape(whole.mesh)
    if prod(mesh) != len(parts) or len(mesh) != len(whole.placements):
        raise UserError(f"{paths[0]}: {name} is cut over {mesh} ranks, and there are {len(parts)}")
    pieces: dict[Shape, Stored] = {}
    for rank, (part, path) in enumerate(zip(parts, paths, strict=True)):
        offsets, sizes = _part_of(whole, mesh, rank, path, name)
        if (part.shape, part.local.shape) != (whole.shape, sizes):
            raise UserError(
                f"{path}: its part of {name} is {part.local.shape} of {part.shape}; {sizes} of "
                f"{whole.shape} is expected"
            )
        if prod(sizes):
            pieces.setdefault(offsets, part.local)  # replicas lie at the same place
    return pieced_together(whole.shape, whole.local.dtype, list(pieces.items()))


def _part_of(
    whole: CutTensor, mesh: Shape, rank: int, path: Path, name: str
) -> tuple[Shape, Shape]:
    """Where a rank's part begins and how large it is: cut as ``torch.chunk`` does, mesh by mesh."""
    offsets, sizes = [0] * len(whole.shape), list(whole.shape)
    for at, placement in enumerate(whole.placements):
        coordinate = rank // prod(mesh[at + 1 :]) % mesh[at]
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind != "Shard":
            raise UserError(f"{path}: {name} is placed as {kind}, which is not read")
        dim = placement.get("dim")
        chunk = -(-sizes[dim] // mesh[at])
        start = min(coordinate * chunk, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _mesh_shape(mesh: Inert) -> Shape:
    """Ranks along each dimension of the mesh, in the forms that torch 2.5 to 2.13 keep it in."""
    ranks = mesh.get("mesh")
    if isinstance(ranks, Stored):
        return ranks.shape
    layout = mesh.get("_layout")
    axes = layout.get("axes") if isinstance(layout, Inert) else None
    if axes is not None:
        return tuple(prod(axis.get("shape")) for axis in axes)
    shape = layout.get("shape") if isinstance(layout, Inert) else None
    if shape is None:
        raise UserError("the mesh of ranks is in a form that is not read")
    return (shape,) if isinstance(shape, int) else tuple(shape)

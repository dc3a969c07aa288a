"""Weights in the files of a checkpoint: which file holds which, who writes it, and reading them.

One process writes every file. Of ranks each writes some: all of them gather each weight together,
and each keeps those of its own files, so no process ever holds a whole model. Any number of ranks
reads what any other number wrote, one weight at a time, each its part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from forage.errors import UserError
from forage.training import lora
from forage.training.critic import Critic
from forage.training.layouts.open_layout import stored_safetensors
from forage.training.layouts.stored import Weights
from forage.training.model import shapes_by_name, weights_by_name
from forage.training.sharding import part_of, whole

SHARD_BYTES = 4 << 30
"""The most bytes of weights in one file, unless a single tensor has more."""
MODEL, CRITIC = "model", "critic"
"""How the names of the files begin."""

NamedWeights = Iterable[tuple[str, Tensor]]
Part = Mapping[Path, Mapping[str, Tensor]]
"""What a process writes: weights by name, by file."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process among those that write together."""

    rank: int
    num_ranks: int


ALONE = Place(0, 1)


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


def whole_by_name(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint of a model without adapters holds: each tensor once, cut or not."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor.detach()))  # tied weights are one tensor
    return dict(found.values())


def collect(
    folder: Path, stem: str, shapes: NamedWeights, weights: NamedWeights, place: Place, copy: bool
) -> Part:
    """The weights of this process's files, in host memory; the first writes the index.

    ``shapes`` are the same without numbers. ``copy``: also what lies in host memory already.
    """
    num_bytes = {name: tensor.nbytes for name, tensor in shapes}
    files = shards(stem, num_bytes)
    file_of = {name: file for file, names in files.items() for name in names}
    part: dict[Path, dict[str, Tensor]] = {
        folder / file: {} for file in list(files)[place.rank :: place.num_ranks]
    }
    for name, weight in weights:
        gathered = whole(weight)  # by all ranks, whoever keeps it
        if (kept := part.get(folder / file_of[name])) is not None:
            kept[name] = gathered.to("cpu", copy=copy)
    if place.rank == 0:
        write_index(folder, stem, files, num_bytes)
    return part


def learnt_part(model: PreTrainedModel, folder: Path, place: Place, copy: bool) -> Part:
    """What this process writes of a model: of all weights, or of the adapters alone."""
    if not lora.has_adapters(model):
        weights = whole_by_name(model)
        return collect(folder, MODEL, weights.items(), weights.items(), place, copy)
    adapters = {n: whole(w.detach()) for n, w in lora.adapter_parameters(model).items()}
    if place.rank != 0:  # peft reads one file
        return {}
    kept = {name: weight.to("cpu", copy=copy) for name, weight in adapters.items()}
    return {folder / lora.ADAPTER_WEIGHTS: kept}


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write what stands beside the weights: the model's settings, or those of its adapters."""
    if lora.has_adapters(model):
        lora.adapter_config(model).save_pretrained(str(folder))
        return
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def write_part(part: Part) -> None:
    """Write the files of a process; raises ``OSError`` and ``SafetensorError``."""
    for path, weights in part.items():
        plain = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(plain, path, metadata={"format": "pt"})


def write_learnt(model: PreTrainedModel, folder: Path, place: Place = ALONE) -> None:
    """Write what a checkpoint holds of a model: all weights, or the adapters alone."""
    folder.mkdir(parents=True, exist_ok=True)
    if place.rank == 0:
        write_config(model, folder)
    write_part(learnt_part(model, folder, place, copy=False))


def write_merged(model: PreTrainedModel, folder: Path, place: Place = ALONE) -> None:
    """Write a whole model without a tokenizer, its adapters merged, for servers to load."""
    folder.mkdir(parents=True, exist_ok=True)
    if place.rank == 0:
        model.config.save_pretrained(folder)
    weights = (shapes_by_name(model), weights_by_name(model))
    write_part(collect(folder, MODEL, *weights, place, copy=False))


def together(group: dist.ProcessGroup | None, write: Callable[[], None]) -> None:
    """Write; of ranks all raise ``OSError`` where one of them could not."""
    if group is None:
        write()
        return
    failure = None
    try:
        write()
    except (OSError, SafetensorError) as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    for rank, found in enumerate(failures):
        if found is not None:
            raise OSError(f"rank {rank}: {found}")


def restore_model(model: PreTrainedModel, checkpoint: Path) -> None:
    """Give a model the weights of a checkpoint, or its adapters; of ranks each takes its part.

    Raises ``UserError`` for those of another model, before a weight is changed.
    """
    has_adapters = (checkpoint / lora.ADAPTER_CONFIG).exists()
    if has_adapters != lora.has_adapters(model):
        had, has = ("with", "without") if has_adapters else ("without", "with")
        raise UserError(
            f"the checkpoint {checkpoint} is of a run {had} model.lora, the config is {has} it: "
            "set model.lora as in that run, or train into a new output_dir"
        )
    if has_adapters:
        lora.load_adapters(lora.read_adapters(checkpoint), model)
        return
    try:
        _fill(whole_by_name(model), stored_safetensors(checkpoint))
    except ValueError as error:
        raise UserError(f"the checkpoint {checkpoint} is of another model: {error}") from error


def restore_critic(critic: Critic, checkpoint: Path) -> None:
    """Give a critic the weights of a checkpoint; raises ``UserError`` for those of another."""
    weights: Weights = stored_safetensors(checkpoint, CRITIC)
    if not weights:
        raise UserError(
            f"the checkpoint {checkpoint} holds no critic: its run had another "
            "algorithm.advantage; set that one, or train into a new output_dir"
        )
    try:
        _fill(learnt_by_name(critic), weights)
    except ValueError as error:
        raise UserError(
            f"the critic of the checkpoint {checkpoint} is of another model; set "
            f"algorithm.advantage.critic.path to the one that it started from ({error})"
        ) from error


def learnt_by_name(root: nn.Module) -> dict[str, Tensor]:
    """The weights of ``root`` that are learnt, cut or not."""
    return {name: w.detach() for name, w in root.named_parameters() if w.requires_grad}


def _fill(own: Mapping[str, Tensor], weights: Weights) -> None:
    """Copy stored weights into those of the same names; raises ``ValueError`` where they differ."""
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unexpected:
        raise ValueError(f"missing {missing[:3]}, unexpected {unexpected[:3]}")
    for name, weight in own.items():
        if weights[name].shape != weight.shape:
            raise ValueError(f"{name} is {[*weights[name].shape]}, not {[*weight.shape]}")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(part_of(weights[name].read(), weight))

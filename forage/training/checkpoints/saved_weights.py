"""The weights of a checkpoint: what of them a process writes, and reads.

Of ranks each writes and reads the rows that it holds, beside the others and into the same files, so
nothing is gathered, and any number of ranks reads what any other number wrote. What servers are to
load is gathered weight by weight, because adapters are added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from forage.errors import UserError
from forage.training import lora
from forage.training.checkpoints.run_state import read_state
from forage.training.checkpoints.weight_files import WeightFiles, WeightPiece
from forage.training.critic import Critic
from forage.training.layouts.open_layout import stored_safetensors
from forage.training.layouts.stored import Stored, Weights
from forage.training.model import shapes_by_name, weights_by_name
from forage.training.ranks.sharding import Ranks, piece_of

MODEL, CRITIC, ADAPTERS = "model", "critic", "adapter_model"
"""How the names of the files begin."""

NamedWeights = Iterable[tuple[str, Tensor]]


def whole_by_name(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint of a model without adapters holds: each tensor once, cut or not."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor.detach()))  # tied weights are one tensor
    return dict(found.values())


class SavedPart:
    """What this process writes of some weights: the rows that it holds."""

    def __init__(
        self, folder: Path, stem: str, weights: NamedWeights, ranks: Ranks | None, copy: bool
    ) -> None:
        """``copy``: as they are now, in host memory; else as they are when they are written."""
        each = list(weights)
        # peft, and who serves adapters, read one file.
        self._files = WeightFiles(folder, stem, each, in_one_file=stem == ADAPTERS)
        self._is_first = _is_first(ranks)
        self._pieces = [
            WeightPiece(name, starts, values.to("cpu", copy=True) if copy else values)
            for name, weight in each
            if ranks is None or ranks.is_first_with(weight)
            for starts, values in [piece_of(weight)]
        ]

    def write(self) -> None:
        """Write it beside what others write; raises ``OSError``."""
        if self._is_first:
            self._files.write_headers()
        self._files.write(self._pieces)


def learnt_part(model: PreTrainedModel, folder: Path, ranks: Ranks | None, copy: bool) -> SavedPart:
    """What this process writes of a model: of all weights, or of the adapters alone."""
    if lora.has_adapters(model):
        adapters = {name: w.detach() for name, w in lora.adapter_parameters(model).items()}
        return SavedPart(folder, ADAPTERS, adapters.items(), ranks, copy)
    return SavedPart(folder, MODEL, whole_by_name(model).items(), ranks, copy)


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write what stands beside the weights: the model's settings, or those of its adapters."""
    if lora.has_adapters(model):
        lora.adapter_config(model).save_pretrained(str(folder))
        return
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def write_learnt(model: PreTrainedModel, folder: Path, ranks: Ranks | None = None) -> None:
    """Write what a checkpoint holds of a model: all weights, or the adapters alone."""

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if _is_first(ranks):
            write_config(model, folder)
        learnt_part(model, folder, ranks, copy=False).write()

    together(ranks, write)


def write_merged(model: PreTrainedModel, folder: Path, ranks: Ranks | None = None) -> None:
    """Write a whole model without a tokenizer, its adapters merged, for servers to load.

    Ranks gather each weight together, and write it in turns.
    """
    rank, num_ranks = (0, 1) if ranks is None else (dist.get_rank(), dist.get_world_size())
    files = WeightFiles(folder, MODEL, shapes_by_name(model))
    pieces = (
        WeightPiece(name, (0,) * weight.ndim, weight)
        for number, (name, weight) in enumerate(weights_by_name(model))
        if number % num_ranks == rank
    )

    def write() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if _is_first(ranks):
                model.config.save_pretrained(folder)
                files.write_headers()
            files.write(pieces)
        finally:
            for _ in pieces:  # the others wait for this rank to gather the rest
                pass

    together(ranks, write)


def _is_first(ranks: Ranks | None) -> bool:
    return ranks is None or dist.get_rank() == 0


def together(ranks: Ranks | None, write: Callable[[], None]) -> None:
    """Write; of ranks all raise ``OSError`` where one of them could not."""
    if ranks is None:
        write()
        return
    group = ranks.writing_group
    failure = None
    try:
        write()
    except OSError as error:
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
        adapters = lora.read_adapters(checkpoint)
        if read_state(checkpoint).base:  # its weights are compared, wherever they lie by now
            its_base = lora.adapter_config(model).base_model_name_or_path
            adapters.settings.base_model_name_or_path = its_base
        lora.load_adapters(adapters, model)
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
            starts, values = piece_of(weight)
            values.copy_(_read(weights[name], starts, tuple(values.shape)))


def _read(stored: Stored, starts: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The piece of a stored tensor that begins at ``starts``, without reading other rows."""
    if not shape:
        return stored.read()
    rows = stored.read_rows(starts[0], starts[0] + shape[0])
    return rows[:, starts[1] : starts[1] + shape[1]] if len(shape) == 2 else rows

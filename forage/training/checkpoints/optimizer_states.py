"""AdamW, and what it remembers of each weight, by the weight's name, in memory and on disk.

The files are a distributed checkpoint of torch's. Every rank writes the parts that it holds, side
by side, and reads the parts that it needs, so what four ranks wrote is read by one process or by
three. One process writes the same layout.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_map

from forage.remote.listed_pickle import ListedUnpickler

_METADATA = ".metadata"
_ABOUT = "torch.distributed.checkpoint.metadata."
_LISTED = {
    *(f"{_ABOUT}{name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")),
    *(f"{_ABOUT}{name}" for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    *(f"{_ABOUT}_MEM_FORMAT_ENCODING", "torch.distributed.checkpoint.filesystem._StorageInfo"),
    *("torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.Path"),
    *(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""What the metadata of states names. ``BytesStorageMetadata`` is not in it: torch unpickles such an
entry, whatever it holds."""

States = dict[str, dict[str, Tensor]]
"""The states of each learnt weight: its steps, and its two moments."""


def adamw(
    weights: Iterable[nn.Parameter], learning_rate: float, weight_decay: float, is_offloaded: bool
) -> AdamW:
    """The optimizer of those weights that are learnt.

    On a GPU and for weights in host memory torch updates a weight in one pass. Else it would hold
    the roots of all second moments beside them on a GPU, and pass a dozen times over host memory.
    """
    learnt = [weight for weight in weights if weight.requires_grad]
    is_fused = is_offloaded or learnt[0].is_cuda or None
    return AdamW(learnt, lr=learning_rate, weight_decay=weight_decay, fused=is_fused)


def states_of(root: nn.Module, optimizer: Optimizer) -> States:
    """The states as they are; those of a weight that was never updated are zeros, as at first."""
    return {
        name: dict(optimizer.state[weight]) if weight in optimizer.state else _new_states(weight)
        for name, weight in root.named_parameters()
        if weight.requires_grad
    }


def restore(root: nn.Module, optimizer: Optimizer, states: States) -> None:
    """Make the optimizer go on from ``states``."""
    for name, weight in root.named_parameters():
        if weight.requires_grad:
            optimizer.state[weight] = states[name]


def copies_of(states: Mapping[str, States]) -> dict[str, States]:
    """The states as they are now, in host memory."""
    return tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), dict(states))


def write_states(
    states: Mapping[str, States], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Write the states of several models by name; all ranks of ``group`` call this together.

    Raises ``OSError`` where they cannot be written.
    """
    with _one_process_is_enough():
        save(dict(states), checkpoint_id=folder, process_group=group, no_dist=group is None)


def read_states(states: Mapping[str, States], folder: Path) -> None:
    """Read into these states, in place: others beside them may find no room.

    Raises ``OSError`` where the folder has them of other names or shapes, and ``UserError`` where
    reading it could run code.
    """
    reader = _Reader(folder)
    with _one_process_is_enough():
        load(dict(states), storage_reader=reader, no_dist=not dist.is_initialized())


class _Reader(FileSystemReader):
    """Reads the metadata, a pickle, by the names listed above; torch calls whatever one names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            with (folder / _METADATA).open("rb") as file:
                self._metadata = ListedUnpickler(file, _LISTED, folder / _METADATA).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError) as error:
            raise OSError(f"{folder / _METADATA} is damaged ({error!r})") from error

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


@contextmanager
def _one_process_is_enough() -> Iterator[None]:
    """No warning without ranks; and torch's error, which is no ``Exception``, becomes one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank, (reason, _) = next(iter(error.failures.items()))
            raise OSError(f"rank {rank}: {str(reason).partition(chr(10))[0]}") from error


def _new_states(weight: Tensor) -> dict[str, Tensor]:
    moments = {key: torch.zeros_like(weight.detach()) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=weight.device), **moments}

"""Ranks: processes that hold a part of the weights each, and compute a gradient together.

Weights, gradients and optimizer states are cut over ranks by torch's FSDP2, block by block, and
gathered for the time that a block computes; tensor and sequence parallelism compose with it. A rank
is handed the whole batch and takes its own micro-batches of it by a rule that all ranks know. The
loss divides by the batch's global counts, so gradients are summed and never averaged.

How 8 ranks stand with 2 replicas, sequences cut over 2 and matrices over 2 (the last moves first)::

    rank       0 1 2 3   4 5 6 7
    replica    0 0 0 0   1 1 1 1
    sequence   0 0 1 1   0 0 1 1
    matrix     0 1 0 1   0 1 0 1

Ranks that differ in sequence and matrix alone compute the same micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from forage.algorithms.packing import CostOf, empty_rows
from forage.batch import Rows
from forage.config.placement_config import TrainerPlacement
from forage.models.attention_heads import attention_heads
from forage.models.recurrence import recurrent_layers
from forage.training.ranks.skeleton import materialize
from forage.training.ranks.tensor_parallel import check_divisible, cut_block
from forage.training.ranks.ulysses import SequenceRanks, check_heads, check_not_recurrent

T = TypeVar("T")

_WRITING_PATIENCE = timedelta(hours=2)
"""A disk may be slow; of a rank that dies the others hear at once."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks of a trainer: what it holds, and what it computes."""

    placement: TrainerPlacement
    shard_mesh: DeviceMesh
    """The ranks that weights are cut over; two dimensions, the first of them replicas, or one."""
    tensor_mesh: DeviceMesh | None
    sequence_ranks: SequenceRanks | None
    data_group: dist.ProcessGroup
    """Ranks that compute different micro-batches, this one among them."""
    data_rank: int
    num_data_ranks: int
    writing_group: dist.ProcessGroup
    """All ranks, for what they write together while they learn: its sums are of the CPU."""
    device: torch.device
    """What this rank computes on."""
    cost_of: CostOf
    """What a sequence of so many tokens costs to learn."""

    @staticmethod
    def join(placement: TrainerPlacement, device_type: str, cost_of: CostOf) -> Ranks:
        """The groups of this rank; torch's default process group is there already."""
        num_ranks, replicas = dist.get_world_size(), placement.replicas
        sequence, tensor = placement.sequence_parallel, placement.tensor_parallel
        data = num_ranks // (sequence * tensor)
        by_work = init_device_mesh(
            device_type, (data, sequence, tensor), mesh_dim_names=("data", "sequence", "tensor")
        )
        shards = num_ranks // (replicas * tensor)
        by_weights = init_device_mesh(
            device_type,
            (replicas, shards, tensor),
            mesh_dim_names=("replicate", "shard", "tensor"),
        )
        patience = timedelta(seconds=placement.timeout_s)
        for group in (*by_work.get_all_groups(), *by_weights.get_all_groups()):
            _set_pg_timeout(patience, group)  # a mesh gives its groups torch's own half an hour
        rows_group = by_work["sequence"].get_group()
        return Ranks(
            placement=placement,
            shard_mesh=by_weights["replicate", "shard"] if replicas > 1 else by_weights["shard"],
            tensor_mesh=by_weights["tensor"] if tensor > 1 else None,
            sequence_ranks=SequenceRanks(rows_group, dist.get_rank(rows_group), sequence)
            if sequence > 1
            else None,
            data_group=by_work["data"].get_group(),
            data_rank=by_work["data"].get_local_rank(),
            num_data_ranks=data,
            writing_group=_new_group_of_all(),
            device=torch.device("cpu")
            if device_type == "cpu"
            else torch.device(device_type, torch.cuda.current_device()),
            cost_of=cost_of,
        )

    def shard(self, root: nn.Module, base: PreTrainedModel, is_offloaded: bool = False) -> None:
        """Cut the weights of ``root`` over the ranks, in place; raises ``UserError``.

        ``base`` is the model inside it, and ``root``'s forward is all that is ever called.
        """
        check_fits(base, self.placement)
        blocks = base.base_model.layers
        assert isinstance(blocks, nn.ModuleList), "a model's blocks are a list"
        dtype = self.placement.compute_dtype
        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, dtype) if dtype else None,
            reduce_dtype=torch.float32 if dtype else None,
        )
        pin = self.shard_mesh.device_type != "cpu"
        offload = CPUOffloadPolicy(pin_memory=pin) if is_offloaded else OffloadPolicy()
        for module in (*blocks, root):
            materialize(module)  # whole for this moment, and no more than this module
            if module is not root and self.tensor_mesh is not None:
                cut_block(module, self.tensor_mesh)
            # Also the root's weights are let go of after a forward pass: no forward pass may find
            # weights that were gathered before the last update.
            fully_shard(
                module,
                mesh=self.shard_mesh,
                reshard_after_forward=True,
                mp_policy=precision,
                offload_policy=offload,
            )
        for module in root.modules():
            if isinstance(module, FSDPModule):  # each has a factor: the root's reaches no block
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def accumulate(
        self,
        root: nn.Module,
        rows: Sequence[Rows],
        loss_of: Callable[[Rows], tuple[Tensor, T]],
    ) -> list[tuple[float, T]]:
        """Set each rank's part of the gradient; the values and reports of all micro-batches.

        They come in the order of ``rows``, on every rank the same.
        """
        for parameter in root.parameters():
            parameter.grad = None
        assert isinstance(root, FSDPModule), "the weights are cut over ranks"
        mine = self._deal(rows)
        results: dict[int, tuple[float, T]] = {}
        for number, index in enumerate(mine):
            is_last = number == len(mine) - 1
            root.set_requires_gradient_sync(is_last or not self.placement.reduce_once)
            loss, report = loss_of(empty_rows() if index is None else rows[index])
            loss.backward()
            if index is not None:
                results[index] = (loss.item(), report)
        return self._gather(results)

    def evaluate(self, rows: Sequence[Rows], run: Callable[[Rows], Tensor]) -> list[Tensor]:
        """``run`` on all micro-batches without gradients, in order, on every rank the same."""
        results: dict[int, Tensor] = {}
        with torch.no_grad():
            for index in self._deal(rows):
                values = run(empty_rows() if index is None else rows[index])
                if index is not None:
                    results[index] = values
        return self._gather(results)

    def clip(self, root: nn.Module, max_norm: float) -> float:
        """Scale the gradient to ``max_norm`` at most; returns its norm before, over all ranks.

        Weights lie on several meshes, over which torch cannot add up in one go. Here each number
        is counted on one rank, and one sum goes over all ranks, so that all of them scale by the
        same factor to the last bit.
        """
        gradients = [weight.grad for weight in root.parameters()]
        parts = [each for each in gradients if isinstance(each, DTensor)]
        counted = [each.to_local() for each in parts if self.is_first_with(each)]
        total = nn.utils.get_total_norm(counted).double().square().cpu().reshape(1)
        dist.all_reduce(total)
        norm = total.sqrt().item()
        factor = min(1.0, max_norm / (norm + 1e-6))  # as torch has it
        for each in parts:
            each.to_local().mul_(factor)
        return norm

    def is_first_with(self, tensor: Tensor) -> bool:
        """Whether this rank is the first of those that hold the same part of a tensor."""
        if not isinstance(tensor, DTensor):
            return dist.get_rank() == 0
        mesh = tensor.device_mesh
        place = mesh.get_coordinate()
        assert place is not None, "every rank is in every mesh"
        copies = [i for i, each in enumerate(tensor.placements) if each.is_replicate()]
        is_whole = self.tensor_mesh is not None and "tensor" not in (mesh.mesh_dim_names or ())
        is_first = self.tensor_mesh is None or self.tensor_mesh.get_local_rank() == 0
        return all(place[i] == 0 for i in copies) and (is_first or not is_whole)

    def _deal(self, rows: Sequence[Rows]) -> list[int | None]:
        costs = [
            sum(self.cost_of(end - start) for start, end in pairwise(each.packed.starts_S1))
            for each in rows
        ]
        return deal(costs, self.data_rank, self.num_data_ranks)

    def _gather(self, results: dict[int, T]) -> list[T]:
        """What all ranks have computed, by the index of the micro-batch."""
        parts: list[dict[int, T]] = [{} for _ in range(self.num_data_ranks)]
        on_cpu = tree_map_only(Tensor, lambda each: each.cpu(), results)
        dist.all_gather_object(parts, on_cpu, group=self.data_group)
        everything = {index: each for part in parts for index, each in part.items()}
        return [everything[index] for index in range(len(everything))]


def _new_group_of_all() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=_WRITING_PATIENCE)
    assert isinstance(group, dist.ProcessGroup), "this rank is in the group of all"
    return group


def deal(costs: Sequence[float], rank: int, num_ranks: int) -> list[int | None]:
    """The micro-batches of a rank, by index; None is an empty one, to keep in step.

    Ranks gather a block's weights together, so the slowest sets the pace of each round: the
    dearest micro-batches share the first round, and so on.
    """
    by_cost = sorted(range(len(costs)), key=lambda i: -costs[i])
    places = [start + rank for start in range(0, len(by_cost), num_ranks)]
    return [by_cost[place] if place < len(by_cost) else None for place in places]


def check_fits(base: PreTrainedModel, placement: TrainerPlacement) -> None:
    """Raise ``UserError`` if the model's heads or tokens cannot be cut as ``placement`` says."""
    tensor, sequence = placement.tensor_parallel, placement.sequence_parallel
    if tensor > 1:
        check_divisible(base, tensor, "placement.trainer.tensor_parallel")
    if sequence > 1:
        check_not_recurrent(any(recurrent_layers(base)), sequence)
        for heads in attention_heads(base.config):
            check_heads(heads.num_heads // tensor, heads.num_kv_heads // tensor, sequence)


def gathered(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each learnt weight whole; every rank must go through all of them, in this order."""
    for name, weight in root.named_parameters():
        if weight.requires_grad:
            yield name, whole(weight.detach())


def piece_of(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """The part of a tensor that this process holds, and the indices at which it begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tensor
    chunks = tensor.__create_chunk_list__()  # what a distributed checkpoint asks for
    starts = tuple(chunks[0].offsets) if chunks else (0,) * tensor.ndim
    return starts, tensor.to_local()


def part_of(value: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of ``value``, which is whole, as ``weight`` is cut."""
    value = value.to(weight.device)
    if not isinstance(weight, DTensor):
        return value
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be cut over ranks; they must all ask for it.

    A part that rests in host memory goes to its rank's GPU first, for that is where NCCL gathers.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    there = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(there, DTensor), "a part stays a part where it goes"
    return there.full_tensor()

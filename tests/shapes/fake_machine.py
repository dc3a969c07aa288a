"""A rank's machine that computes nothing: tensors have no values, and messages go nowhere.

Weights and activations are torch's fake tensors, and the process group is torch's fake one. What a
step reads on the host (masks, lengths, token ids) is real. A number that the host asks of a fake
tensor is 1, and a mask made of fake tensors is true everywhere. Bytes are counted as storages come
and go, so the figures are the same on any machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_COLLECTIVES = ("c10d", "_c10d_functional")


@dataclass(frozen=True, slots=True)
class Collective:
    """A message among ranks: torch's name of it, and the bytes of its largest tensor."""

    name: str
    num_bytes: int


@dataclass(slots=True)
class Trace:
    """A rank's allocated bytes, their peak, and its messages in order."""

    now: int = 0
    peak: int = 0
    collectives: list[Collective] = field(default_factory=list)

    def restart(self) -> None:
        """Starts over; what is still allocated stays counted."""
        self.peak = self.now
        self.collectives.clear()


class FakeMachine(TorchDispatchMode):
    """Inside ``running``, operations on fake tensors are counted and those on real ones are run."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._sizes: dict[int, int] = {}
        self._is_counting = True

    @contextmanager
    def running(self, rank: int, num_ranks: int) -> Iterator[Trace]:
        """Joins a process group of ``num_ranks`` as ``rank``; gives what is counted inside."""
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        try:
            with ExitStack() as stack:
                stack.enter_context(self._resizes())
                stack.enter_context(self._shapes_of_whole_tensors())
                stack.enter_context(self.fake)
                stack.enter_context(self)
                yield self.trace
        finally:
            dist.destroy_process_group()

    def empty(self, weight: Tensor) -> Tensor:
        """A fake tensor in main memory, like ``weight``."""
        with self.fake:
            return torch.empty(weight.shape, dtype=weight.dtype, device="cpu")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:  # its operations on parts come here again
            return NotImplemented
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        fakes = [each for each in tensors if isinstance(each, FakeTensor)]
        if not fakes and (tensors or not _makes_numbers(func, kwargs)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return _one(fakes[0])
        if func in _INDEXED:
            args = (args[0], [_places(each) for each in args[1]], *args[2:])
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, FakeTensor) and each.device.type == "cpu":
                self._count(each)
        if func.namespace in _COLLECTIVES and func.name() != "_c10d_functional::wait_tensor":
            sizes = [each.nbytes for each in (*fakes, *tree_leaves(result)) if _is_fake(each)]
            self.trace.collectives.append(Collective(func.name(), max(sizes)))
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._is_counting and key not in self._sizes:
            weakref.finalize(storage, self._set, key, 0)
            self._set(key, storage.nbytes())

    def _set(self, key: int, num_bytes: int) -> None:
        self.trace.now += num_bytes - self._sizes.pop(key, 0)
        self.trace.peak = max(self.trace.peak, self.trace.now)
        if num_bytes:
            self._sizes[key] = num_bytes

    @contextmanager
    def _resizes(self) -> Iterator[None]:
        """Counts storages that are resized: FSDP frees gathered weights in this way."""
        own = torch.UntypedStorage.resize_
        known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            is_known = storage._cdata in self._sizes or storage in known
            result = own(storage, size)
            if is_known:
                known.add(storage)
                self._set(storage._cdata, storage.nbytes())
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    @contextmanager
    def _shapes_of_whole_tensors(self) -> Iterator[None]:
        """Leaves out the whole tensors from which DTensor learns the shape of a result."""
        own: Callable[..., Any] = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate(*args: Any, **named: Any) -> Any:
            self._is_counting = False
            try:
                return own(*args, **named)
            finally:
                self._is_counting = True

        with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate):
            yield


def _is_fake(each: object) -> bool:
    return isinstance(each, FakeTensor)


def _makes_numbers(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation without tensors makes weights or activations, not places or masks."""
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return "arange" not in func.name() and (dtype.is_floating_point or dtype is torch.uint8)


def _one(fake: Tensor) -> bool | int | float:
    if fake.dtype is torch.bool:
        return True
    return 1.0 if fake.dtype.is_floating_point else 1


def _places(index: Tensor | None) -> Tensor | None:
    """A mask as the places where it is true."""
    if index is None or index.dtype is not torch.bool:
        return index
    with _disable_current_modes():
        if isinstance(index, FakeTensor):
            assert index.ndim == 1, "masks of activations have one dimension"
            return torch.arange(index.numel())
        (places,) = index.nonzero(as_tuple=True)
        return places

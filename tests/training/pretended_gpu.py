"""A GPU in name only: tensors report torch's meta device, and compute on the CPU.

As on a GPU, an operation on tensors of both devices fails. torch's own stand-ins for a GPU have no
values, or no gradients if torch was built without CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("meta")
_aten = torch.ops.aten
_BETWEEN_DEVICES = (_aten._to_copy.default, _aten.copy_.default)
_BY_INDEX = (_aten.index.Tensor, _aten.index_put_.default)


class OnGpu(Tensor):
    """A tensor that reports ``GPU``; ``held`` contains its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        said = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=GPU,
        )
        said.held = held
        return said

    # As in torch's own subclasses; its stub leaves the class out.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class PretendedGpu(TorchDispatchMode):
    """A context in which tensors can be moved to ``GPU`` and created there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def move(root: nn.Module) -> None:
    """Moves the weights and buffers of a module to ``GPU``; optimizers keep their references."""
    for weight in root.parameters():
        there = nn.Parameter(OnGpu(weight.detach().clone()), weight.requires_grad)
        torch.utils.swap_tensors(weight, there)
    for module in root.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else OnGpu(buffer)


def values(tensor: Tensor) -> Tensor:
    """The values of a tensor on ``GPU``, on the CPU."""
    tensor = tensor.detach()
    assert isinstance(tensor, OnGpu), "the tensor is on the CPU"
    return tensor.held


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    there = [each for each in tree_leaves((args, kwargs)) if isinstance(each, OnGpu)]
    _check(func, args, kwargs, bool(there))
    if func is _aten._fused_sdp_choice.default:
        return 0  # attention by its definition: the other kernels need one device
    plain_args, named = tree_map_only(OnGpu, lambda each: each.held, (tuple(args), dict(kwargs)))
    is_there = bool(there)
    if func in _BETWEEN_DEVICES or func in _BY_INDEX:
        is_there = isinstance(args[0], OnGpu)
    if named.get("device") is not None:
        is_there = torch.device(named["device"]) == GPU
        named["device"] = torch.device("cpu")
    result = func(*plain_args, **named)
    if not is_there:
        return result
    known = {id(each.held): each for each in there}  # a tensor changed in place stays itself

    def said(each: Tensor) -> Tensor:
        return known[id(each)] if id(each) in known else OnGpu(each)

    return tree_map_only(Tensor, said, result)


def _check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_any_there: bool) -> None:
    """Raises as a GPU would if tensors of both devices meet; numbers without axes may."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if func in _BETWEEN_DEVICES or not is_any_there:
        return
    if func in _BY_INDEX:  # a tensor on a GPU may be indexed from the CPU
        tensors = [args[0]] if isinstance(args[0], OnGpu) else tensors
    here = [each for each in tensors if not isinstance(each, OnGpu) and each.ndim]
    if here:
        raise RuntimeError(f"{func} meets tensors of the GPU and of the CPU")

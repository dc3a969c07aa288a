"""Layers with a recurrent state: linear attention, Mamba, short convolutions.

transformers' own modules compute them. With several sequences in one row they would carry the state
from one sequence to the next, so their forward is replaced by one that passes the row to the call's
``attend`` object (``attention.py``), which runs the module sequence by sequence, each with its own
state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch import Tensor, nn

_READS_STATE = frozenset(("get_conv_state", "get_recurrent_state"))
"""Methods of transformers' cache with which a module reads its state."""
_CACHE_ARGUMENTS = ("cache_params", "past_key_values", "cache")

Kind = tuple[str, int]
"""A state's kind (``conv`` or ``recurrent``) and its number within the layer."""


class RecurrentStates:
    """One layer's states of B sequences, each [B, ...], in place of transformers' cache."""

    def __init__(self, states: dict[Kind, Tensor] | None = None) -> None:
        """``states`` may be changed in place by a layer; None starts new sequences."""
        self.states = states or {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs of a convolution [B, C, kernel size]; None at the start."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the recurrent state [B, ...]; None at the start."""
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Stores the last inputs; returns the stored ones followed by the new ones."""
        before = self.states.get(("conv", state_idx))
        size = conv_kernel_size or conv_states.shape[-1]
        seen = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        if seen.shape[-1] < size:
            kept = pad(seen, (size - seen.shape[-1], 0))
            self.states["conv", state_idx] = kept
            return kept
        self.states["conv", state_idx] = seen[..., -size:]
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        """Stores the state after the last token, and returns it."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether all earlier inputs are kept; always False."""
        return False


def recurrent_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose forward reads a state from transformers' cache, by name."""
    for name, module in model.named_modules():
        code = inspect.unwrap(type(module).forward).__code__
        if _READS_STATE & set(code.co_names):
            yield name, module


def install(model: nn.Module) -> None:
    """Makes the recurrent layers of ``model`` use the forward call's ``attend``, in place."""
    for name, module in recurrent_layers(model):
        if not isinstance(vars(module).get("forward"), _Delegate):
            parameters = inspect.signature(module.forward).parameters
            cache = next((each for each in _CACHE_ARGUMENTS if each in parameters), None)
            assert cache is not None, f"{type(module).__name__} takes no cache by a known name"
            setattr(module, "forward", _Delegate(name, module.forward, cache))  # noqa: B010


class _Delegate:
    """A recurrent layer's forward; an object, so that a copied model calls its own layer."""

    def __init__(self, layer: str, forward: Callable[..., Tensor], cache: str) -> None:
        self._layer, self._forward, self._cache = layer, forward, cache

    def __call__(self, hidden_states: Tensor, *, attend: Any = None, **named: Any) -> Tensor:
        if attend is None:
            return self._forward(hidden_states, **named)
        assert named.get("attention_mask") is None, "masks belong to the attend object"
        run = partial(self._run, named)
        return attend.recur(self._layer, run, hidden_states)

    def _run(self, named: dict[str, Any], hidden: Tensor, states: RecurrentStates | None) -> Tensor:
        return self._forward(hidden, **{**named, self._cache: states})

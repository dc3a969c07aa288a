"""The states of recurrent layers, one per slot; they replace keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from forage.models.recurrence import Kind, RecurrentStates

Run = Callable[[Tensor, RecurrentStates | None], Tensor]
States = dict[str, dict[Kind, Tensor]]
"""States [B, ...] by layer and kind."""


class SlotStates:
    """Every slot's state in each recurrent layer, after the slot's last computed token."""

    def __init__(self, shapes: States, num_slots: int, device: torch.device) -> None:
        """``shapes`` are the states of one sequence, from which shapes and dtypes are taken."""
        self._pools = {
            layer: {
                kind: torch.zeros((num_slots, *one.shape[1:]), dtype=one.dtype, device=device)
                for kind, one in kinds.items()
            }
            for layer, kinds in shapes.items()
        }

    def read(self, layer: str, slot: int, run: Run, hidden_1TH: Tensor, is_new: bool) -> Tensor:
        """Output [1, T, H] for a slot's next tokens; ``is_new`` starts its sequence."""
        return self.read_rows(layer, [slot], run, hidden_1TH, [0], is_new)

    def read_rows(
        self,
        layer: str,
        slots: Sequence[int],
        run: Run,
        hidden: Tensor,
        kept: Sequence[int],
        is_new: bool = False,
    ) -> Tensor:
        """Output [R, T, H] for the next tokens of R slots; only ``kept`` rows store their state."""
        pools = self._pools[layer]
        before = {} if is_new else {kind: pool[list(slots)] for kind, pool in pools.items()}
        states = RecurrentStates(before)
        out = run(hidden, states)
        kept_slots = [slots[row] for row in kept]
        for kind, state in states.states.items():
            pools[kind][kept_slots] = state[list(kept)]
        return out

    def clear(self) -> None:
        """Resets every slot's states to zero."""
        for pools in self._pools.values():
            for pool in pools.values():
                pool.zero_()

    def copy_out(self, slot: int) -> States:
        """Returns a copy of a slot's states."""
        return {
            layer: {kind: pool[slot : slot + 1].clone() for kind, pool in pools.items()}
            for layer, pools in self._pools.items()
        }

    def copy_in(self, slot: int, states: Mapping[str, Mapping[Kind, Tensor]]) -> None:
        """Sets a slot's states to what ``copy_out`` returned."""
        for layer, pools in self._pools.items():
            for kind, pool in pools.items():
                pool[slot : slot + 1] = states[layer][kind]

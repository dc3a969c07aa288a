"""The states of recurrent layers, one per slot; they replace keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from forage.models.recurrence import Kind, RecurrentStates

Run = Callable[[Tensor, RecurrentStates | None], Tensor]
States = dict[str, dict[Kind, Tensor]]
"""States [B, ...] by layer and kind."""


class SlotStates:
    """Every slot's state in each recurrent layer, after the slot's last computed token."""

    def __init__(self, shapes: States, num_slots: int, device: torch.device) -> None:
        """``shapes``: states of one sequence, from which shapes and dtypes are taken."""
        self._pools = {
            layer: {
                kind: torch.zeros((num_slots, *one.shape[1:]), dtype=one.dtype, device=device)
                for kind, one in kinds.items()
            }
            for layer, kinds in shapes.items()
        }

    def read(self, layer: str, slot: int, run: Run, hidden_1TH: Tensor, is_new: bool) -> Tensor:
        """Output [1, T, H] for a slot's next tokens; ``is_new`` starts its sequence."""
        return self._advance(layer, [slot], run, hidden_1TH, [0], is_new)

    def read_singles(self, layer: str, slots: list[int], run: Run, hidden_R1H: Tensor) -> Tensor:
        """Output [R, 1, H] for one more token per slot; rows beyond the slots are padding."""
        rows = slots + [slots[0]] * (len(hidden_R1H) - len(slots))
        return self._advance(layer, rows, run, hidden_R1H, range(len(slots)), is_new=False)

    def read_tile(
        self, layer: str, tile: slice, run: Run, hidden_R1H: Tensor, rows: list[int]
    ) -> Tensor:
        """Output [R, 1, H] for a tile of slots, of which only ``rows`` have a new token."""
        return self._advance(layer, list(range(*tile.indices(tile.stop))), run, hidden_R1H, rows)

    def _advance(
        self,
        layer: str,
        slots: list[int],
        run: Run,
        hidden: Tensor,
        kept_rows: list[int] | range,
        is_new: bool = False,
    ) -> Tensor:
        pools = self._pools[layer]
        before = {} if is_new else {kind: pool[slots] for kind, pool in pools.items()}
        states = RecurrentStates(before)
        out = run(hidden, states)
        kept = list(kept_rows)
        kept_slots = [slots[row] for row in kept]
        for kind, state in states.states.items():
            pools[kind][kept_slots] = state[kept]
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

"""The states of recurrent layers, one per slot: they stand in for keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from forage.models.recurrence import Kind, RecurrentStates

Run = Callable[[Tensor, RecurrentStates | None], Tensor]
States = dict[str, dict[Kind, Tensor]]
"""States [B, ...] by layer and kind."""


class SlotStates:
    """Every slot's state of each recurrent layer, as of the last token that the slot computed."""

    def __init__(self, shapes: States, num_slots: int, device: torch.device) -> None:
        """``shapes`` are states of one sequence, whose shapes and types the slots' have."""
        self._pools = {
            layer: {
                kind: torch.zeros((num_slots, *one.shape[1:]), dtype=one.dtype, device=device)
                for kind, one in kinds.items()
            }
            for layer, kinds in shapes.items()
        }

    def read(self, layer: str, slot: int, run: Run, hidden_1TH: Tensor, is_new: bool) -> Tensor:
        """Output [1, T, H] of a slot's next tokens; ``is_new`` starts its sequence."""
        return self._advance(layer, [slot], run, hidden_1TH, [0], is_new)

    def read_singles(self, layer: str, slots: list[int], run: Run, hidden_R1H: Tensor) -> Tensor:
        """Output [R, 1, H] of one more token of each slot; rows beyond the slots are padding."""
        rows = slots + [slots[0]] * (len(hidden_R1H) - len(slots))
        return self._advance(layer, rows, run, hidden_R1H, range(len(slots)), is_new=False)

    def read_tile(
        self, layer: str, tile: slice, run: Run, hidden_R1H: Tensor, rows: list[int]
    ) -> Tensor:
        """Output [R, 1, H] of a tile of slots, of which only ``rows`` have another token."""
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
        """Forget every slot's states."""
        for pools in self._pools.values():
            for pool in pools.values():
                pool.zero_()

    def copy_out(self, slot: int) -> States:
        """A copy of a slot's states."""
        return {
            layer: {kind: pool[slot : slot + 1].clone() for kind, pool in pools.items()}
            for layer, pools in self._pools.items()
        }

    def copy_in(self, slot: int, states: Mapping[str, Mapping[Kind, Tensor]]) -> None:
        """Gives a slot what ``copy_out`` returned."""
        for layer, pools in self._pools.items():
            for kind, pool in pools.items():
                pool[slot : slot + 1] = states[layer][kind]

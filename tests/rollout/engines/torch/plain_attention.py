"""Attention over slots by its definition, one token at a time, to compare kernels with."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forage.rollout.engines.torch import engine_thread
from forage.rollout.engines.torch.graph_forward import QUERY_BLOCK, GraphForward
from forage.rollout.engines.torch.slots import SlotCache


class PlainAttention:
    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache

    def attend_singles(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions_S: Tensor,
        scale: float,
    ) -> Tensor:
        assert query.dtype == key.dtype == value.dtype == self._cache.dtype, "kernels need one type"
        out = torch.zeros_like(query)
        for slot, position in enumerate(positions_S.tolist()):
            if position != self._cache.scratch:
                self._keep(layer, slot, position, key[slot], value[slot])
                out[slot] = self._attend(layer, slot, position + 1, query[slot], scale)
        return out

    def attend_blocks(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slots_N: Tensor,
        positions_N: Tensor,
        lengths_B: Tensor,
        scale: float,
    ) -> Tensor:
        assert query.dtype == key.dtype == value.dtype == self._cache.dtype, "kernels need one type"
        out = torch.zeros_like(query)
        for row, (slot, position) in enumerate(
            zip(slots_N.tolist(), positions_N.tolist(), strict=True)
        ):
            if position < int(lengths_B[row // QUERY_BLOCK]):
                self._keep(layer, slot, position, key[row], value[row])
        for row, (slot, position) in enumerate(
            zip(slots_N.tolist(), positions_N.tolist(), strict=True)
        ):
            if position < int(lengths_B[row // QUERY_BLOCK]):
                out[row] = self._attend(layer, slot, position + 1, query[row], scale)
        return out

    def _keep(self, layer: int, slot: int, position: int, key_KD: Tensor, value_KD: Tensor) -> None:
        self._cache.keys[layer][slot, :, :, position] = key_KD
        self._cache.values[layer][slot, :, position] = value_KD

    def _attend(self, layer: int, slot: int, length: int, query_HD: Tensor, scale: float) -> Tensor:
        keys_KDL = self._cache.keys[layer][slot, :, :, :length].double()
        values_KLD = self._cache.values[layer][slot, :, :length].double()
        grouped_KGD = query_HD.double().view(keys_KDL.shape[0], -1, query_HD.shape[1])
        weights = (grouped_KGD @ keys_KDL * scale).softmax(dim=-1)
        return (weights @ values_KLD).view(query_HD.shape).to(query_HD.dtype)


class TwoRoundings(PlainAttention):
    """The two passes differ in bits, as on a GPU, where products have two shapes."""

    def attend_blocks(self, *arguments: Any, **named: Any) -> Tensor:
        return super().attend_blocks(*arguments, **named) * (1 + 1e-5)


def run_ahead(
    monkeypatch: pytest.MonkeyPatch, attention_of: type[PlainAttention] = PlainAttention
) -> None:
    """Makes engines decode as on a GPU, but without capturing graphs."""

    def choose(model: PreTrainedModel, cache: SlotCache, *_: object) -> GraphForward:
        torch.set_num_threads(1)
        return GraphForward(model, cache, attention_of)

    monkeypatch.setattr(engine_thread, "choose_forward", choose)

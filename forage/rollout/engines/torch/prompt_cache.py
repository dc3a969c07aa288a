"""Prompts that were computed once: the episodes of a group, and of later steps, begin with them."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from forage.rollout.engines.torch.pending_turns import Slot
from forage.rollout.engines.torch.slots import SlotCache

NUM_PROMPTS_KEPT = 32


class PromptCache:
    """Keys, values and the logits after the last token of recent prompts, under one version."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self._prompts: OrderedDict[tuple[int, ...], tuple[list[tuple[Tensor, Tensor]], Tensor]]
        self._prompts = OrderedDict()

    def keep(self, prompt: tuple[int, ...], slot: Slot, logits_V: Tensor) -> None:
        """Copy what the slot has of the prompt; the oldest one is forgotten."""
        layers = self._cache.copy_out(slot.index, slot.num_cached)
        self._prompts[prompt] = (layers, logits_V.clone())
        if len(self._prompts) > NUM_PROMPTS_KEPT:
            self._prompts.popitem(last=False)

    def start(self, slot: Slot) -> Tensor | None:
        """Give the slot its prompt's keys and values; the logits [V], or None where not kept."""
        prompt = slot.prompt
        kept = None if prompt is None else self._prompts.get(prompt)
        if kept is None:
            return None
        layers, logits_V = kept
        self._cache.copy_in(slot.index, layers)
        slot.num_cached = len(slot.token_ids)
        return logits_V

    def clear(self) -> None:
        """Forget all: the weights have changed."""
        self._prompts.clear()

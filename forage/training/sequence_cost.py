"""What a sequence of so many tokens costs a model to learn, by which micro-batches are balanced."""

from __future__ import annotations

from functools import partial

from torch import nn
from transformers import PreTrainedModel

from forage.algorithms.packing import CostOf, estimated_flops
from forage.models.attention_heads import attention_heads


def cost_of(model: PreTrainedModel) -> CostOf:
    """Estimates the operations for a sequence of so many tokens, to balance micro-batches by."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "a causal model embeds its tokens"
    num_parameters = sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    # A tied matrix is also the head's; an embedding of its own is only looked up, at no cost.
    num_multiplied = num_parameters - (0 if is_tied else embedding.weight.numel())
    return partial(
        estimated_flops,
        num_parameters=num_multiplied,
        attention_width=sum(h.num_heads * h.head_dim for h in attention_heads(model.config)),
    )

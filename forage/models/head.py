"""Computes logits from hidden states, including the scales and caps of the model family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


KNOWN_IDS = "forage_token_ids"
"""The attribute of a model that says which rows are tokens (``environment/vocabulary.py``)."""


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [..., V] of last hidden states [..., H], as the model's own forward computes them.

    After the head come a scale (Cohere, Falcon-H1, Granite) and a soft cap (Gemma), if the
    configuration has them.
    """
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    logits = head(hidden)
    config = model.config.get_text_config()
    for name in ("logit_scale", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None and factor != 1:
            logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None and divisor != 1:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits

"""Log-probabilities of given tokens, without ever holding all logits.

The head is applied to a chunk of positions at a time and recomputed in the backward pass, so
memory is a chunk times the vocabulary, whatever the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from forage.batch import Packed
from forage.training.packed_attention import PackedAttend

LOGITS_PER_CHUNK = 1 << 22
"""Logits held at a time (16 MB in float32)."""


def token_logprobs(
    model: PreTrainedModel,
    packed: Packed,
    is_wanted_N: Tensor,
    temperature: float,
    has_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nats) of each wanted token: [M] and [M], in order.

    ``is_wanted_N`` marks tokens of ``packed``; a token is predicted at the position before it, so
    the first token of a sequence cannot be wanted. Temperature 0 stands for 1. The entropy has a
    gradient only with ``has_entropy_gradient``, because that costs memory.
    """
    hidden_MH = hidden_before(model, packed, is_wanted_N)
    targets_M = packed.token_ids_N[is_wanted_N].to(hidden_MH.device)
    return head_logprobs(model, hidden_MH, targets_M, temperature or 1.0, has_entropy_gradient)


def hidden_before(model: PreTrainedModel, packed: Packed, is_wanted_N: Tensor) -> Tensor:
    """The hidden states [M, H] from which the wanted tokens are predicted."""
    wanted_M = is_wanted_N.nonzero()[:, 0]
    assert not bool((packed.positions_N[wanted_M] == 0).any()), "no token predicts a first token"
    hidden_NH = hidden_states(model, packed)
    return hidden_NH[(wanted_M - 1).to(hidden_NH.device)]


def hidden_states(model: PreTrainedModel, packed: Packed) -> Tensor:
    """The last hidden states [N, H] of sequences laid end to end."""
    device = next(model.parameters()).device
    output = model.base_model(
        input_ids=packed.token_ids_N[None].to(device),
        position_ids=packed.positions_N[None].to(device),
        use_cache=False,
        attend=PackedAttend(packed.starts_S1),
    )
    return output.last_hidden_state[0]


def head_logprobs(
    model: PreTrainedModel,
    hidden_MH: Tensor,
    targets_M: Tensor,
    temperature: float,
    has_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """``log_softmax(head(hidden) / temperature)`` at the targets, and the entropy, by chunks."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    vocabulary = head.weight.shape[0]
    size = max(1, LOGITS_PER_CHUNK // vocabulary)

    def one_chunk(hidden_CH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_CV = torch.log_softmax(head(hidden_CH).float() / temperature, dim=-1)
        with torch.set_grad_enabled(has_entropy_gradient and torch.is_grad_enabled()):
            entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
        return logprobs_CV.gather(1, targets_C[:, None])[:, 0], entropy_C

    chunks = [
        checkpoint(one_chunk, hidden_CH, targets_C, use_reentrant=False)
        for hidden_CH, targets_C in zip(hidden_MH.split(size), targets_M.split(size), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)

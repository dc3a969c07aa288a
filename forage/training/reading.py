"""How well a model reads: what it had to find in a passage, and whether it would have written it.

Measured on held-out demonstrations by teacher forcing, so it needs no engine and takes a second.
A supervised start that does not read shows here after minutes; its loss alone does not tell, for
most of it is the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from forage.algorithms.packing import lay_end_to_end
from forage.environment.codec import Codec
from forage.training.logprobs import hidden_states
from forage.training.warmstart import covers
from forage.types import Episode, Origin


@dataclass(frozen=True, slots=True)
class ReadArguments:
    """An episode's tokens, and the spans of them that a model can only know from a passage."""

    token_ids_T: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def find_read_arguments(episode: Episode, codec: Codec) -> ReadArguments:
    """Where actions name what stood in an observation and not in the prompt, at first mention."""
    spans: list[tuple[int, int]] = []
    turns = iter(episode.turns)
    known = observed = ""
    start = 0
    for segment in episode.segments:
        end = start + len(segment.token_ids_T)
        match segment.origin:
            case Origin.PROMPT:
                known += codec.decode(segment.token_ids_T)
            case Origin.OBSERVATION:
                observed += codec.decode(segment.token_ids_T)
            case Origin.SAMPLED:
                argument = next(turns).argument
                if argument and argument in observed and argument not in known:
                    is_covered_T = covers(segment.token_ids_T, argument, codec)
                    first = start + is_covered_T.index(True)
                    spans.append((first, first + sum(is_covered_T)))
        start = end
    return ReadArguments(episode.token_ids_T, tuple(spans))


def reading_accuracy(model: PreTrainedModel, held_out: Sequence[ReadArguments]) -> float:
    """The share of read arguments of which every token is the most likely one; NaN without any."""
    hits: list[bool] = []
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    with torch.inference_mode():
        for episode in held_out:
            hidden_TH = hidden_states(model, lay_end_to_end([episode.token_ids_T]))
            for first, end in episode.spans:
                best = head(hidden_TH[first - 1 : end - 1]).argmax(dim=-1).tolist()
                hits.append(tuple(best) == episode.token_ids_T[first:end])
    return sum(hits) / len(hits) if hits else float("nan")

"""The memory of a run, part by part, from counts alone: formulas, their sources, and no measuring.

Weights, gradients and AdamW's two moments, sharded over the GPUs: ZeRO, stage 3
(https://arxiv.org/abs/1910.02054, section 3). Activations of a transformer layer: what autograd
keeps for the backward pass, counted as in https://arxiv.org/abs/2205.05198, section 4.1, for a
layer with RMS norms, grouped queries and a gated feed-forward, and without dropout. Gradient
checkpointing keeps a layer's input alone and one layer's activations at a time
(https://arxiv.org/abs/1604.06174). Left out: the CUDA context and fragmentation (1 to 3 GB a GPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from forage.config import RunConfig
from forage.plan.models import ModelSize
from forage.rollout.slots import LENGTH_BUCKET, round_up
from forage.training.attention import QUERY_BLOCK
from forage.training.logprobs import LOGITS_PER_CHUNK

SERVER_BYTES = 2
"""A server engine samples in bfloat16."""
_MOMENTS = 2
_LOGIT_COPIES = 4
"""Logits, log-probabilities, their exponentials and the gradient of a chunk."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of one kind on one device, and in which phases of a step it is held."""

    name: str
    num_bytes: int
    formula: str
    while_sampling: bool
    while_learning: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """The parts on one device, and what ``placement.offload`` moves to a node's host memory."""

    parts: tuple[Part, ...]
    host_bytes_per_node: int

    @property
    def sampling_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts if part.while_sampling)

    @property
    def learning_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts if part.while_learning)

    @property
    def peak_bytes(self) -> int:
        """What one device has to hold at the worst moment of a step."""
        return max(self.sampling_bytes, self.learning_bytes)


def plan_memory(
    config: RunConfig, model: ModelSize, critic: ModelSize | None, num_cores: int
) -> Memory:
    """Memory of each device; ``num_cores`` is how many micro-batches a CPU learns at a time."""
    trainer = _trainer_states(config, model, critic)
    parts = [
        *trainer,
        *_learning_parts(config, model, num_cores if config.model.device == "cpu" else 1),
        *_engine_parts(config, model),
    ]
    is_offloaded = config.placement.offload
    resting = sum(part.num_bytes for part in trainer) if is_offloaded else 0
    return Memory(tuple(parts), resting * config.placement.gpus_per_node)


def bytes_of(config: RunConfig) -> int:
    """Bytes of one number of the model."""
    return 4 if config.model.dtype == "float32" else 2


def _trainer_states(config: RunConfig, model: ModelSize, critic: ModelSize | None) -> list[Part]:
    """What the trainer keeps from step to step; with offload it is elsewhere while sampling."""
    size, gpus = bytes_of(config), config.placement.num_gpus
    stays = not config.placement.offload
    shard = f" / {gpus} GPUs" if gpus > 1 else ""
    count, text = model.num_parameters, f"{_millions(model.num_parameters)} x {size} B"

    def state(name: str, numbers: int, formula: str) -> Part:
        return Part(name, ceil(numbers * size / gpus), formula + shard, stays, True)

    parts = [
        state("weights", count, text),
        state("optimizer (AdamW)", _MOMENTS * count, f"2 moments x {text}"),
    ]
    if config.algorithm.kl.coefficient:
        parts.append(state("reference model", count, text))
    if critic is not None:
        numbers = critic.num_base_parameters + critic.hidden_size + 1
        text = f"{_millions(numbers)} x {size} B"
        parts.append(state("critic: weights", numbers, text))
        parts.append(state("critic: optimizer", _MOMENTS * numbers, f"2 moments x {text}"))
    return parts


def _learning_parts(config: RunConfig, model: ModelSize, num_at_once: int) -> list[Part]:
    size, gpus = bytes_of(config), config.placement.num_gpus
    num_sets = 1 + num_at_once
    numbers = num_sets * model.num_parameters
    count = f"{num_sets} sets (summed, and at work) x {_millions(model.num_parameters)} x {size} B"
    shard = f" / {gpus} GPUs" if gpus > 1 else ""
    tokens = config.trainer.max_tokens_per_micro_batch
    kept = activation_bytes(config, model, tokens)
    how = "layer inputs and one layer" if config.model.gradient_checkpointing else "all layers"
    many = f", {num_at_once} at a time" if num_at_once > 1 else ""
    logits = _LOGIT_COPIES * LOGITS_PER_CHUNK * 4 * num_at_once
    parts = [
        Part("gradients", ceil(numbers * size / gpus), count + shard, False, True),
        Part(
            "activations",
            kept * num_at_once,
            f"micro-batch of {tokens:,} tokens: {how}{many}",
            False,
            True,
        ),
        Part(
            "logits", logits, f"{_LOGIT_COPIES} chunks of {LOGITS_PER_CHUNK:,} x 4 B", False, True
        ),
    ]
    if gpus > 1:
        numbers = max(model.num_embedding_parameters, _layer_parameters(model))
        text = f"largest part, whole: {_millions(numbers)} x {size} B"
        parts.append(Part("gathered weights", numbers * size, text, False, True))
    return parts


def _engine_parts(config: RunConfig, model: ModelSize) -> list[Part]:
    placement = config.placement
    if not placement.has_server:
        num_bytes, tokens = torch_cache_bytes(config, model), cache_tokens(config)
        text = f"{tokens:,} tokens x {model.kv_numbers_per_token:,} x {bytes_of(config)} B"
        return [Part("KV cache", num_bytes, text, True, True)]
    # A server that shares its GPUs with an offloaded trainer gives its memory back meanwhile.
    stays = not placement.offload
    tensor_parallel, gpus = placement.tensor_parallel, placement.num_gpus
    weights = ceil(model.num_parameters * SERVER_BYTES / tensor_parallel)
    tokens = config.rollout.max_concurrent_episodes * config.environment.max_tokens
    cache = ceil(tokens * model.kv_numbers_per_token * SERVER_BYTES / gpus)
    return [
        Part(
            f"engine: weights ({placement.engine})",
            weights,
            f"{_millions(model.num_parameters)} x {SERVER_BYTES} B / {tensor_parallel} "
            "(tensor_parallel)",
            True,
            stays,
        ),
        Part(
            "engine: KV cache",
            cache,
            f"at most {tokens:,} tokens x {model.kv_numbers_per_token:,} x {SERVER_BYTES} B / "
            f"{gpus} GPUs",
            True,
            stays,
        ),
    ]


def cache_tokens(config: RunConfig) -> int:
    """Token places in the slots of the in-process engine (``rollout/slots.py``)."""
    engine = config.rollout.engine
    num_slots = round_up(engine.num_slots, engine.tile_rows)
    capacity = round_up(config.environment.max_tokens + engine.prefill_bucket, LENGTH_BUCKET)
    return num_slots * (capacity + LENGTH_BUCKET)


def torch_cache_bytes(config: RunConfig, model: ModelSize) -> int:
    """Keys and values of all slots of the in-process engine."""
    return cache_tokens(config) * model.kv_numbers_per_token * bytes_of(config)


def activation_bytes(config: RunConfig, model: ModelSize, num_tokens: int) -> int:
    """What a forward pass over a micro-batch keeps for its backward pass, logits left out."""
    size, hidden = bytes_of(config), model.hidden_size
    norm = (4 + 2 * size) * hidden  # its input in float32, normalised, and scaled
    numbers = _attention_numbers(config, model)
    numbers += 4 * model.intermediate_size  # gate, its SiLU, up, the product
    layer = 2 * norm + size * numbers
    if config.model.gradient_checkpointing:
        layers = model.num_layers * size * hidden + layer
    else:
        layers = model.num_layers * layer
    # Of the last norm the scaled states are not kept, but those of them that predict a token are.
    return num_tokens * (layers + norm)


def _attention_numbers(config: RunConfig, model: ModelSize) -> int:
    """Numbers a token that attention keeps: queries, keys, values, output (and scores on a CPU)."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if config.model.device != "cpu":  # the fused kernel keeps its output, which is copied once
        return 3 * queries + 2 * keys
    # Blocks of queries meet all keys before their end: half of the square, and a rest. Each block
    # has a copy of those keys and values, one for each head.
    longest = config.environment.max_tokens
    width = (longest + QUERY_BLOCK) / 2
    copies = 2 * queries * ceil(longest / QUERY_BLOCK) * width / longest
    return 2 * queries + round(copies + model.num_heads * width)


def _layer_parameters(model: ModelSize) -> int:
    return (model.num_base_parameters - model.num_embedding_parameters) // model.num_layers


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count < 1e9 else f"{count / 1e9:,.2f} G"

"""The memory of a run, part by part: formulas over counts, with their sources; nothing is measured.

Weights, gradients and AdamW's two moments, sharded over the GPUs: ZeRO, stage 3
(https://arxiv.org/abs/1910.02054, section 3). Activations of a transformer layer: what autograd
keeps for the backward pass, counted as in https://arxiv.org/abs/2205.05198, section 4.1, for a
layer with RMS norms, grouped queries and a gated feed-forward, and without dropout. Gradient
checkpointing keeps a layer's input alone and one layer's activations at a time
(https://arxiv.org/abs/1604.06174).

With adapters (``model.lora``; https://arxiv.org/abs/2106.09685, section 4.2) the weights N are
frozen in ``model.dtype`` of b bytes. Only the A numbers of the adapters are trained, rank x
(inputs + outputs) for each layer that has one, in float32 whatever ``model.dtype`` is::

    without adapters: weights N b, optimizer 2 N b, gradients (a set) N b
    with adapters:    weights N b + 4 A, optimizer 2 x 4 A, gradients (a set) 4 A
                      activations of a token: rank x 4 more for each adapter, and below float32 a
                      float32 copy of its input

A reference that is the start of the run, and a critic made of it, share these weights. For
Qwen2.5-7B in bfloat16 with rank 16 beside every layer, N b = 15.23 GB and A = 40.4 M: 0.16 GB of
adapters and 0.32 GB of moments replace 30.46 GB of moments.

Tensor parallelism cuts the matrices of the blocks: embedding, head and adapters are whole on each
of its ranks (``training/tensor_parallel.py``; one half of an adapter is cut, which is not
counted). Ranks gather a block's weights while they use them, and meanwhile those of the next one;
the embedding and the head are gathered all the while.

Left out: the CUDA context and fragmentation (1 to 3 GB a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from forage.config.run_config import RunConfig
from forage.plan.models import BesideSizes, ModelSize
from forage.rollout.engines.torch.slots import LENGTH_BUCKET, round_up
from forage.training.logprobs import logits_per_chunk
from forage.training.packed_attention import QUERY_BLOCK

KV_CACHE = "KV cache"
"""The part that only sampling in this process needs."""
SERVER_BYTES = 2
"""A server engine samples in bfloat16."""
_MOMENTS = 2
_ADAPTER_BYTES = 4
"""Adapters are in float32 (``training/lora.py``): smaller steps would be rounded away."""
_LOGIT_COPIES = 4
"""Logits, log-probabilities, their exponentials and the gradient of a chunk."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A count of numbers, the bytes of each, and how many tensor parallelism leaves whole."""

    count: int
    size: int
    uncut: int

    @property
    def text(self) -> str:
        return f"{_millions(self.count)} x {self.size} B"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Memory of one kind on one device, and in which phases of a step it is held."""

    name: str
    num_bytes: int
    formula: str
    while_sampling: bool = False
    while_learning: bool = True
    rests_in_host: bool = False
    """It is in the host's memory, in pieces on the device for the time that they are used."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The parts on one device, and what rests in a node's host memory."""

    parts: tuple[MemoryPart, ...]
    host_bytes_per_node: int

    @property
    def sampling_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts if part.while_sampling)

    @property
    def learning_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts if part.while_learning)

    @property
    def peak_bytes(self) -> int:
        """The most that one device holds at any moment of a step."""
        return max(self.sampling_bytes, self.learning_bytes)

    @property
    def supervised_bytes(self) -> int:
        """What learning takes where nothing is played: no cache of an engine."""
        return sum(part.num_bytes for part in self.parts if part.name != KV_CACHE)


def plan_memory(config: RunConfig, model: ModelSize, beside: BesideSizes, num_cores: int) -> Memory:
    """Memory of each device; a CPU may learn a micro-batch on each core.

    A reference of unknown size is taken to be as large as the policy, whose family it is of.
    """
    on_cpu = config.model.device == "cpu"
    num_at_once = (config.trainer.micro_batches_at_once or num_cores) if on_cpu else 1
    parts = [
        *_trainer_states(config, model, beside),
        *_learning_parts(config, model, num_at_once),
        *_engine_parts(config, model),
    ]
    if config.trainer.checkpoint_in_background:
        parts.append(_copy_for_a_checkpoint(config, parts))
    resting = sum(part.num_bytes for part in parts if part.rests_in_host)
    placement = config.placement
    learners = min(placement.num_ranks or 1, placement.gpus_per_node)
    return Memory(tuple(parts), resting * learners)


def _copy_for_a_checkpoint(config: RunConfig, parts: Sequence[MemoryPart]) -> MemoryPart:
    """What is copied into host memory, and written from there while training goes on."""
    learnt = {"weights", "optimizer (AdamW)", "critic: weights", "critic: optimizer"}
    if config.model.lora is not None:
        learnt = learnt - {"weights"} | {"adapters"}
    num_bytes = sum(part.num_bytes for part in parts if part.name in learnt)
    on_gpu = config.model.device != "cpu"
    text = "what is learnt, with its moments (trainer.checkpoint_in_background)"
    return MemoryPart("copy for a checkpoint", num_bytes, text, not on_gpu, not on_gpu, on_gpu)


def bytes_of(config: RunConfig) -> int:
    """Bytes of one number of the model."""
    return 4 if config.model.dtype == "float32" else 2


def _cache_size(config: RunConfig) -> int:
    """Bytes of one number of keys and values."""
    return 2 if config.model.arithmetic == "bfloat16" else bytes_of(config)


def _trainer_states(config: RunConfig, model: ModelSize, beside: BesideSizes) -> list[MemoryPart]:
    """What the trainer keeps from step to step; offload moves it to the host."""
    size, placement = bytes_of(config), config.placement
    num_parts, shard = _cut(config)
    tensor_parallel = placement.trainer.tensor_parallel
    offload = placement.learning.offload

    def state(name: str, numbers: _Numbers, moments: int = 1) -> MemoryPart:
        num_bytes = moments * _held(numbers, num_parts, tensor_parallel)
        times = f"{moments} moments x " if moments > 1 else ""
        owner = name.partition(" ")[0].rstrip(":")
        rests = (owner if owner in ("critic", "reference") else "policy") in offload
        there = not rests
        sampling = there and not placement.own_gpus
        formula = times + numbers.text + shard + _uncut(numbers, num_parts, tensor_parallel)
        return MemoryPart(name, num_bytes, formula, sampling, there, rests)

    lora, algorithm, critic = config.model.lora, config.algorithm, beside.critic
    outside = model.num_outside_blocks
    whole, learnt = _Numbers(model.num_parameters, size, outside), _learnt(config, model)
    parts = [state("weights", whole)]
    if config.model.arithmetic is not None:
        parts.append(state("copies in bfloat16", _Numbers(model.num_parameters, 2, outside)))
    if lora is not None:
        parts.append(state("adapters", learnt))
    parts.append(state("optimizer (AdamW)", learnt, _MOMENTS))
    if algorithm.kl is not None and (lora is None or algorithm.kl.reference is not None):
        frozen = beside.reference or model
        weights = _Numbers(frozen.num_parameters, size, frozen.num_outside_blocks)
        parts.append(state("reference model", weights))
    if critic is not None:
        head = critic.hidden_size + 1
        embedding = critic.num_embedding_parameters
        trunk = _Numbers(critic.num_base_parameters + head, size, embedding + head)
        if lora is None:
            learnt = trunk
        else:
            if algorithm.critic is not None and algorithm.critic.path is not None:
                parts.append(state("critic: frozen weights", trunk))
            count = _learnt(config, critic).count + head
            learnt = _Numbers(count, _ADAPTER_BYTES, count)
        parts.append(state("critic: weights", learnt))
        parts.append(state("critic: optimizer", learnt, _MOMENTS))
    return parts


def _learnt(config: RunConfig, model: ModelSize) -> _Numbers:
    """The trained numbers of a model: all of them, or the adapters'.

    Rank 2 beside layers 4 -> 4 and 4 -> 2: 2 x (4 + 4) + 2 x (4 + 2) = 28 numbers of 4 bytes.
    """
    lora = config.model.lora
    if lora is None:
        return _Numbers(model.num_parameters, bytes_of(config), model.num_outside_blocks)
    widths = [layer.num_inputs + layer.num_outputs for layer in model.adapted(lora)]
    count = lora.rank * sum(widths)
    return _Numbers(count, _ADAPTER_BYTES, count)


def _held(numbers: _Numbers, num_parts: int, tensor_parallel: int) -> int:
    """Bytes of one rank's part of so many, the ranks of tensor parallelism among them.

    Of 10 numbers, 4 of them uncut, in 4 parts with a tensor parallelism of 2: (10 + 4) / 4.
    """
    count = numbers.count + (tensor_parallel - 1) * numbers.uncut
    return ceil(count * numbers.size / num_parts)


def _uncut(numbers: _Numbers, num_parts: int, tensor_parallel: int) -> str:
    """How the page says that some of the numbers are cut into fewer parts."""
    if tensor_parallel == 1:
        return ""
    return f", {_millions(numbers.uncut)} of them / {num_parts // tensor_parallel}"


def _learning_parts(config: RunConfig, model: ModelSize, num_at_once: int) -> list[MemoryPart]:
    placement = config.placement
    trainer = placement.learning
    num_sets = 1 + num_at_once
    learnt = _learnt(config, model)
    sets = f"{num_sets} sets (the sum, and the current ones) x {learnt.text}"
    num_parts, shard = _cut(config)
    if trainer.reduce_once:  # summed over the ranks after the last micro-batch alone
        num_parts, shard = trainer.tensor_parallel, ", whole on every rank"
    tokens = config.trainer.max_tokens_per_micro_batch
    kept = activation_bytes(config, model, ceil(tokens / trainer.sequence_parallel))
    how = "layer inputs and one layer" if config.model.gradient_checkpointing else "all layers"
    many = f", {num_at_once} at a time" if num_at_once > 1 else ""
    num_logits = logits_per_chunk(config.model.device)
    logits = _LOGIT_COPIES * num_logits * 4 * num_at_once
    parts = [
        MemoryPart(
            "gradients",
            num_sets * _held(learnt, num_parts, trainer.tensor_parallel),
            sets + shard + _uncut(learnt, num_parts, trainer.tensor_parallel),
            while_learning="policy" not in trainer.offload,
            rests_in_host="policy" in trainer.offload,
        ),
        MemoryPart(
            "activations", kept * num_at_once, f"micro-batch of {tokens:,} tokens: {how}{many}"
        ),
        MemoryPart("logits", logits, f"{_LOGIT_COPIES} chunks of {num_logits:,} x 4 B"),
    ]
    if placement.num_ranks is not None:
        parts.append(_gathered(config, model))
    return parts


def _gathered(config: RunConfig, model: ModelSize) -> MemoryPart:
    """The weights that a rank has whole at once: those outside the blocks, and of two blocks."""
    trainer = config.placement.trainer
    size = 2 if trainer.compute_dtype else bytes_of(config)
    outside = model.num_outside_blocks
    num_blocks = min(2, model.num_layers)
    blocks = (model.num_parameters - outside) * num_blocks // model.num_layers
    numbers = outside + ceil(blocks / trainer.tensor_parallel)
    text = f"embedding, head and {num_blocks} blocks, whole: {_millions(numbers)} x {size} B"
    return MemoryPart("gathered weights", numbers * size, text)


def _cut(config: RunConfig) -> tuple[int, str]:
    """The parts that weights are cut into, and how the page says so: ranks less whole copies."""
    placement = config.placement
    num_parts = (placement.num_ranks or 1) // placement.trainer.replicas
    what = "GPUs" if placement.num_gpus > 1 else "ranks"
    return num_parts, f" / {num_parts} {what}" if num_parts > 1 else ""


def _engine_parts(config: RunConfig, model: ModelSize) -> list[MemoryPart]:
    placement = config.placement
    if not placement.has_server:
        num_bytes, tokens = torch_cache_bytes(config, model), cache_tokens(config)
        text = f"{tokens:,} tokens x {model.kv_numbers_per_token:,} x {_cache_size(config)} B"
        cache = MemoryPart(KV_CACHE, num_bytes, text, while_sampling=True)
        if placement.num_ranks is None:
            return [cache]
        size = bytes_of(config)  # ranks hold parts: the engine samples with a copy of its own
        text = f"{_millions(model.num_parameters)} x {size} B, whole, on the first GPU"
        copy = MemoryPart("engine: weights", model.num_parameters * size, text, while_sampling=True)
        return [copy, cache]
    # A server that shares its GPUs in turn frees its memory while the trainer learns; one that has
    # its own holds nothing on those of the trainer.
    stays = not placement.engine.offload and not placement.own_gpus
    tensor_parallel = placement.engine.tensor_parallel
    gpus = placement.own_gpus or placement.num_gpus
    weights = ceil(model.num_parameters * SERVER_BYTES / tensor_parallel)
    numbers, each = _millions(model.num_parameters), f"{SERVER_BYTES} B"
    whole = f"{numbers} x {each} / {tensor_parallel} (tensor_parallel)"
    tokens = config.rollout.max_concurrent_episodes * config.environment.max_tokens
    per_token = model.kv_numbers_per_token
    cache = ceil(tokens * per_token * SERVER_BYTES / gpus)
    at_most = f"at most {tokens:,} tokens x {per_token:,} x {each} / {gpus} GPUs"
    return [
        MemoryPart(f"engine: weights ({placement.engine.kind})", weights, whole, True, stays),
        MemoryPart("engine: KV cache", cache, at_most, True, stays),
    ]


def cache_tokens(config: RunConfig) -> int:
    """Room for tokens in the slots of the in-process engine (``slots.py`` there)."""
    engine = config.rollout.engine
    num_slots = round_up(engine.num_slots, engine.tile_rows)
    capacity = round_up(config.environment.max_tokens + engine.prefill_bucket, LENGTH_BUCKET)
    return num_slots * (capacity + LENGTH_BUCKET)


def torch_cache_bytes(config: RunConfig, model: ModelSize) -> int:
    """Keys and values of all slots of the in-process engine."""
    return cache_tokens(config) * model.kv_numbers_per_token * _cache_size(config)


def activation_bytes(config: RunConfig, model: ModelSize, num_tokens: int) -> int:
    """What a forward pass over a micro-batch keeps for its backward pass, logits left out.

    With adapters this is an upper bound: of a layer without one the input need not be kept.
    """
    size, hidden = bytes_of(config), model.hidden_size
    norm = (4 + 2 * size) * hidden  # its input in float32, normalised, and scaled
    numbers = _attention_numbers(config, model)
    numbers += 4 * model.intermediate_size  # gate, its SiLU, up, the product
    layer = 2 * norm + size * numbers + _adapter_activations(config, model)
    if config.model.gradient_checkpointing:
        layers = model.num_layers * size * hidden + layer
    else:
        layers = model.num_layers * layer
    # The last norm keeps only those scaled states that predict a token, not all of them.
    return num_tokens * (layers + norm)


def _adapter_activations(config: RunConfig, model: ModelSize) -> int:
    """Bytes a token that the adapters of one block keep: what lies between their two matrices."""
    lora = config.model.lora
    if lora is None:
        return 0
    layers = model.adapted(lora)
    numbers = lora.rank * len(layers)
    if bytes_of(config) != _ADAPTER_BYTES:
        numbers += sum(layer.num_inputs for layer in layers)
    return _ADAPTER_BYTES * numbers // model.num_layers


def _attention_numbers(config: RunConfig, model: ModelSize) -> int:
    """Numbers a token that attention keeps: queries, keys, values, output (and scores on a CPU)."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if config.model.device != "cpu":  # the fused kernel keeps its output, copied once
        return 3 * queries + 2 * keys
    # Each block of queries attends to all keys before its end: half of the square, and a rest. It
    # copies those keys and values once for each head.
    longest = config.environment.max_tokens
    width = (longest + QUERY_BLOCK) / 2
    copies = 2 * queries * ceil(longest / QUERY_BLOCK) * width / longest
    return 2 * queries + round(copies + model.num_heads * width)


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count < 1e9 else f"{count / 1e9:,.2f} G"

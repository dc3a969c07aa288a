"""A run is made to fit this machine before it starts, and each of its phases again.

Settings that the recipe leaves open are chosen, and said: the size of micro-batches, how many a CPU
learns at once, recomputation, and the slots of the in-process engine. They fit into a cautious
share of the free memory, and a line says the peak that is expected. What is set stays while it
fits: by the recipe, by the phase before, or by the run that is resumed. If it no longer does, what
changes no result (``RESULTS_STAY``) shrinks, with a warning; otherwise an error names what would.

How many micro-batches a CPU learns at once is measured on two layers of the model. One a core suits
a model whose operations are short; one at a time, over all cores, a model whose weights and
gradients fill the caches. Between them is what many cores want.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forage.algorithms.packing import lay_end_to_end
from forage.config.config_file import leaves, read_tree
from forage.config.model_config import ModelConfig
from forage.config.run_config import RunConfig, with_overrides
from forage.config.trainer_config import TrainerConfig
from forage.errors import UserError
from forage.hardware import (
    WORTH_BFLOAT16,
    bfloat16_gain,
    choose_matmul_kernel,
    free_memory,
    has_gpu,
    matmul_rate,
    num_cores,
)
from forage.models import attention
from forage.plan.fitting import changes_that_fit
from forage.plan.machine import Machine
from forage.plan.memory import plan_memory
from forage.training.gradients import accumulate
from forage.training.logprobs import hidden_states
from forage.training.micro_batches import LARGEST_SHARE
from forage.training.model_size import BesideSizes, ModelSize, measure, measure_beside
from forage.training.warm_start import micro_batch_tokens

LOG = logging.getLogger(__name__)

CHOSEN = (
    "trainer.micro_batches_at_once",
    "trainer.max_tokens_per_micro_batch",
    "rollout.engine.num_slots",
    "model.gradient_checkpointing",
)
"""Keys that are chosen where a recipe leaves them out."""
RESULTS_STAY = CHOSEN[:3]
"""Those that change a result by rounding at most: they shrink even if the recipe sets them."""
CAUTIOUS_SHARES = (0.5, 0.7)
"""What may be planned of a machine's free memory, since other programs will want more; the second
is for a run that cannot do with the first. What is set, and a GPU, may take ``LARGEST_SHARE``."""
Phase = Literal["training", "supervised", "evaluation"]
_SMALL_MODEL = 10_000_000
"""Below so many parameters, an operation is too short to be shared between cores."""
_NUM_TOKENS = 256
_NUM_LAYERS = 2
_ROUNDS = 3
_WORTH = 0.95
"""More at once take more memory, and have to be faster by a twentieth."""


def fit_here(
    config: RunConfig,
    phase: Phase = "training",
    earlier: Path | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """``config`` with what its recipe leaves open chosen for ``machine`` (None: this one).

    ``earlier`` is the ``config.yaml`` of a run that goes on, whose choices are kept. Raises
    ``UserError`` if ``phase`` needs more memory than there is. Ranks and servers are left as they
    are.
    """
    size = None if _is_elsewhere(config) else measure(config.model.path)
    if size is None:
        return config
    is_open: dict[str, bool] = {key: not _is_set(config, key) for key in CHOSEN}
    on_cpu = config.model.device == "cpu"
    chosen: list[str] = []
    if earlier is not None and earlier.is_file():
        # Not as a whole config: functions that only the running program has are written there.
        before = leaves(read_tree(earlier, (RunConfig,)))
        kept = [f"{key}={json.dumps(value)}" for key, value in before if is_open.get(key)]
        config = with_overrides(config, kept)
        is_open = dict.fromkeys(CHOSEN, False)
    elif on_cpu and phase != "evaluation":
        if "bfloat16" in (config.model.dtype, config.model.arithmetic):
            _warn_of_bfloat16(size)
        elif size.num_parameters > _SMALL_MODEL:
            _advise_bfloat16()
        if is_open["trainer.micro_batches_at_once"] and size.num_parameters > _SMALL_MODEL:
            chosen.append(f"trainer.micro_batches_at_once={choose_at_once(config.model)}")
    fitted = with_overrides(config, chosen) if chosen else config
    if not on_cpu and machine is None and not has_gpu():
        return config  # loading the model says so
    free = free_memory(config.model.device) if machine is None else machine.free_bytes(on_cpu)
    cores = num_cores() if machine is None else machine.num_cores
    peak = _peak_of(fitted, size, cores, phase)
    changes = _changes(_as_learnt(fitted, phase), peak, is_open, free)
    if chosen or changes:
        fitted = with_overrides(fitted, changes)
        LOG.info("chosen for this machine: %s", " ".join([*chosen, *changes]))
    if phase != "evaluation":
        learnt = _as_learnt(fitted, phase)
        at_once = (learnt.trainer.micro_batches_at_once or cores) if on_cpu else 1
        _say_plan(learnt.trainer, phase, at_once, peak(learnt), free)
    return fitted


def _say_plan(trainer: TrainerConfig, phase: Phase, at_once: int, peak: int, free: int) -> None:
    """The line before a phase that learns: what it is expected to take."""
    LOG.info(
        "%s: a peak of %.2f GB is expected beside the program itself, %.2f GB of memory are free "
        "(micro-batches of %d tokens, %d at a time)",
        "the warm start" if phase == "supervised" else "training",
        *(peak / 1e9, free / 1e9, trainer.max_tokens_per_micro_batch, at_once),
    )


def _as_learnt(config: RunConfig, phase: Phase) -> RunConfig:
    """With the micro-batches of the phase: supervised learning has its own size."""
    if phase != "supervised":
        return config
    tokens = max(micro_batch_tokens(config.trainer), config.environment.max_tokens)
    trainer = config.trainer.model_copy(update={"max_tokens_per_micro_batch": tokens})
    return config.model_copy(update={"trainer": trainer})


def _peak_of(
    config: RunConfig, size: ModelSize, cores: int, phase: Phase
) -> Callable[[RunConfig], int]:
    """The most that a phase takes at one moment, as a function of changed settings."""
    is_training = phase == "training"
    beside = measure_beside(config.algorithm, size) if is_training else BesideSizes()

    def peak(changed: RunConfig) -> int:
        memory = plan_memory(changed, size, beside, cores)
        if phase == "evaluation":
            return memory.evaluation_bytes
        return memory.peak_bytes if is_training else memory.supervised_bytes

    return peak


def _warn_of_bfloat16(size: ModelSize) -> None:
    """Say before the run what it costs where the processor is slower in bfloat16.

    It has no arithmetic for it, or has AVX512's, which need not be faster, and no AMX.
    """
    rates = [matmul_rate(dtype) for dtype in ("float32", "bfloat16")]
    if rates[1] >= rates[0]:
        return
    plain, slow = (num_cores() * rate / (6 * size.num_parameters) for rate in rates)
    LOG.warning(
        "bfloat16 is %.1f times as slow as float32 on this processor: learning at most about %.2g "
        "tokens a second, where float32 learns %.2g; leave model.dtype and model.arithmetic out",
        rates[0] / rates[1],
        slow,
        plain,
    )


def _advise_bfloat16() -> None:
    """Say before the run where its products could be much faster."""
    gain = bfloat16_gain()
    if gain >= WORTH_BFLOAT16:
        LOG.info(
            "this processor multiplies %.1f times as fast in bfloat16 as in float32: "
            "model.arithmetic=bfloat16 has it do so, and keeps the weights in float32",
            gain,
        )


def _is_elsewhere(config: RunConfig) -> bool:
    """Whether memory is not that of one process here, or the model is no directory to measure."""
    placement = config.placement
    if config.model.endpoint is not None:
        return True
    has_config = (Path(config.model.path) / "config.json").is_file()
    return placement.has_server or placement.num_ranks is not None or not has_config


def _changes(
    config: RunConfig,
    peak: Callable[[RunConfig], int],
    is_open: dict[str, bool],
    memory: int,
) -> Sequence[str]:
    """Overrides after which the run fits into ``memory``; raises ``UserError``."""
    search: Callable[..., list[str] | None] = changes_that_fit
    on_cpu = config.model.device == "cpu"
    most = int(LARGEST_SHARE * memory)
    for share in CAUTIOUS_SHARES if on_cpu else (LARGEST_SHARE,):
        room = int(share * memory)
        changes = search(config, peak, room, lambda key: is_open.get(key, False))
        if changes is not None:
            return changes
    if peak(config) <= most:
        return ()
    changes = search(config, peak, most, lambda key: key in RESULTS_STAY or is_open.get(key, False))
    if changes is not None:
        LOG.warning(
            "memory is short: %.2f GB would be needed and %.2f GB are free; taken instead: %s",
            *(peak(config) / 1e9, memory / 1e9, " ".join(changes)),
        )
        return changes
    changes = search(config, peak, most, lambda key: key in CHOSEN)
    advice = (
        f"set {' '.join(changes)}"
        if changes
        else "no setting of memory is enough: set environment.max_tokens lower, learn adapters "
        "(model.lora={}), or take a smaller model"
    )
    where = "memory" if on_cpu else "GPU memory"
    raise UserError(
        f"{peak(config) / 1e9:,.1f} GB of {where} are needed, and {most / 1e9:,.1f} GB may be "
        f"taken of what is free here; {advice}"
    )


def _is_set(config: RunConfig, key: str) -> bool:
    """Whether the recipe or an override names the key."""
    holder, *rest = config, *key.split(".")
    for name in rest[:-1]:
        if name not in holder.model_fields_set:
            return False
        holder = getattr(holder, name)
    return rest[-1] in holder.model_fields_set


def choose_at_once(config: ModelConfig) -> int:
    """How many micro-batches of ``config.path`` to learn at a time: 1, 2, 4 ... or one a core."""
    most = num_cores()
    if most == 1:
        return 1
    choose_matmul_kernel()
    model = _two_layers(config.path)
    candidates = sorted({*(2**power for power in range(most.bit_length())), most})
    best, best_s = 1, float("inf")
    for at_once in candidates:
        seconds = min(_seconds(model, at_once, most) for _ in range(_ROUNDS))
        if seconds < _WORTH * best_s:
            best, best_s = at_once, seconds
    return best


def _two_layers(path: str) -> PreTrainedModel:
    """Blocks of the model's shape with random weights, which are as fast as the learnt ones."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    config.num_hidden_layers = min(_NUM_LAYERS, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    attention.install(model)
    model.get_input_embeddings().requires_grad_(False)
    return model


def _seconds(model: PreTrainedModel, at_once: int, num_micro_batches: int) -> float:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (_NUM_TOKENS,), generator=generator)
    packed = lay_end_to_end([ids.tolist()])

    def loss() -> tuple[Tensor, None]:
        return hidden_states(model, packed).square().mean(), None

    losses = [partial(loss) for _ in range(num_micro_batches)]
    started = time.perf_counter()
    accumulate(model.base_model, losses, at_once)
    return time.perf_counter() - started

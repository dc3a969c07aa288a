"""How the cores of a CPU are shared out in learning: measured on two layers of the model at hand.

One micro-batch a core suits a model whose operations are short; one at a time, over all cores, a
model whose weights and gradients fill the caches. Between them is what many cores want.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forage import attention
from forage.algorithms.packing import lay_end_to_end
from forage.config.model_config import ModelConfig
from forage.hardware import choose_matmul_kernel, num_cores
from forage.training.gradients import accumulate
from forage.training.logprobs import hidden_states

_NUM_TOKENS = 256
_NUM_LAYERS = 2
_ROUNDS = 3
_WORTH = 0.95
"""More at once take more memory, and have to be faster by a twentieth."""


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
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    config.num_hidden_layers = min(_NUM_LAYERS, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    model = AutoModelForCausalLM.from_config(config)
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

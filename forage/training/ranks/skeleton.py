"""Loads a model without its weights, which are read from their files later.

Ranks hold a part of each weight. If each rank loaded whole models, a machine would need one copy
per GPU. Therefore the modules are created on torch's meta device, and a block's weights are read
when that block is sharded (``sharding.py``). If servers sample, the driver computes nothing and
never reads them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from forage.remote.hub import only_downloaded
from forage.training.layouts.converted import converted
from forage.training.layouts.open_layout import stored_safetensors
from forage.training.layouts.stored import Stored, Weights, cast, held

_STORED = "forage_stored"
_OLD_BUFFER = r"rotary_emb\.inv_freq"
"""A buffer in older files, which transformers now computes."""
_FILES = ("*.json", "model*.safetensors")


def load_skeleton(path: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """The model of a directory or hub id without its weights, which ``materialize`` reads.

    Returns None if its files do not have exactly the model's weights (another format, adapters,
    missing or extra weights). Such a model must be loaded whole, which also reports what is wrong.
    """
    directory = directory_of(path)
    weights = stored_safetensors(directory) if directory is not None else {}
    if directory is None or not weights:
        return None
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    _keep_in_float32(model, dtype)
    weights = converted(weights, model)
    if getattr(config, "quantization_config", None) is not None or not _holds(weights, model):
        return None
    for name, buffer in model.named_buffers():
        if name in weights:
            buffer.copy_(weights[name].read())
    for prefix, module in model.named_modules():
        names = {key: f"{prefix}.{key}" for key in module._parameters}
        found = {key: weights[name] for key, name in names.items() if name in weights}
        if found:
            vars(module)[_STORED] = found
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


def materialize(root: nn.Module) -> None:
    """Reads the missing weights of ``root`` from their files, in place; tied ones stay tied."""
    read: dict[int, nn.Parameter] = {}
    for module in root.modules():
        stored: dict[str, Stored] = vars(module).get(_STORED, {})
        for key, weight in module._parameters.items():
            if weight is None or not weight.is_meta:
                continue
            if id(weight) not in read:
                value = stored[key].read().to(weight.dtype)
                read[id(weight)] = nn.Parameter(value, requires_grad=weight.requires_grad)
            module.register_parameter(key, read[id(weight)])


def stored_weights(model: PreTrainedModel) -> Weights:
    """The tensors that a file of ``model`` must contain, in the model's dtypes, read on demand.

    Tensors in memory are taken from there. Tied weights appear once.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    in_files = {
        f"{prefix}.{key}".removeprefix("."): each
        for prefix, module in model.named_modules()
        for key, each in vars(module).get(_STORED, {}).items()
    }
    return {
        name: cast(in_files[name], tensor.dtype) if tensor.is_meta else held(tensor)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


@contextmanager
def as_if_read(model: nn.Module) -> Iterator[None]:
    """Inside the context, unread weights appear to be on the CPU, without using memory.

    peft creates adapters on the device of the weights that they belong to.
    """
    missing = [
        (module, key, weight)
        for module in model.modules()
        for key, weight in module._parameters.items()
        if weight is not None and weight.is_meta
    ]
    for module, key, weight in missing:
        blank = torch.empty((), dtype=weight.dtype).expand(weight.shape)
        module._parameters[key] = nn.Parameter(blank, requires_grad=weight.requires_grad)
    try:
        yield
    finally:
        for module, key, weight in missing:
            blank = module._parameters[key]
            assert blank is not None, "it was set above"
            weight.requires_grad_(blank.requires_grad)
            module._parameters[key] = weight


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Drops the model's weights; names and shapes stay, and tied weights stay tied."""
    dropped: dict[int, nn.Parameter] = {}  # torch would move a tied weight once for each module
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                blank = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
                module._parameters[key] = dropped.setdefault(id(weight), blank)
    return model.to(torch.device("meta"))  # pyright: ignore[reportArgumentType]  # its decorator


def is_skeleton(model: nn.Module) -> bool:
    """Whether some weights of ``model`` have not been read."""
    return any(weight.is_meta for weight in model.parameters())


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives the weights and buffers that transformers keeps in float32 that type."""
    kept = model._get_dtype_plan(dtype)
    if kept:
        pattern, _, _ = build_glob_alternation(list(kept))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if pattern.search(name):
                tensor.data = tensor.data.to(torch.float32)


def _holds(weights: Weights, model: PreTrainedModel) -> bool:
    """Whether files have every weight and buffer of ``model`` in its shape, and nothing else.

    A tied weight may appear twice if both are equal. Names that transformers skips are allowed.
    """
    state = model.state_dict().keys()
    own = dict(model.named_parameters())
    own |= {name: each for name, each in model.named_buffers() if name in state}
    for name, weight in own.items():
        if name not in weights or weights[name].shape != weight.shape:
            return False
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    skipped = (_OLD_BUFFER, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    extra = weights.keys() - state
    if any(not any(re.search(pattern, name) for pattern in skipped) for name in extra):
        return False
    for name in weights.keys() & state - own.keys():
        other = tied.get(name, "")
        if other not in weights or not torch.equal(weights[name].read(), weights[other].read()):
            return False
    return True


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside the context, new parameters use no memory; buffers, which are not in files, do."""

    thread = threading.get_ident()

    def move(module: nn.Module, name: str, weight: Tensor | None) -> nn.Parameter | None:
        is_another = threading.get_ident() != thread  # the hook applies to all threads
        if is_another or weight is None or weight.is_meta:  # a tied weight stays the same object
            return None
        return nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)

    # Its annotation omits that a hook may return another parameter.
    hook = register_module_parameter_registration_hook(move)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        hook.remove()


def directory_of(path: str, may_fetch: bool = True) -> Path | None:
    """The directory of a model's files, downloaded if necessary; None if that fails."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    is_local = not may_fetch or only_downloaded(path)
    try:
        found = snapshot_download(path, allow_patterns=list(_FILES), local_files_only=is_local)
    except Exception:  # many kinds; loading the whole model reports what is wrong
        return None
    return Path(found)

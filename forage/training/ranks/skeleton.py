"""A model whose weights are still in their files: it knows their names and shapes, and reads later.

Ranks keep a part of each weight. A rank that loaded its models whole would need as many whole
copies on a machine as it has GPUs; so the modules come first, on torch's meta device, and the
weights of a block are read when that block is cut (``sharding.py``). The driver of ranks, which
computes nothing where servers sample, never reads them at all.
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

from forage.remote.hub import only_downloaded
from forage.training.layouts.open_layout import stored_safetensors
from forage.training.layouts.stored import Stored, Weights, cast, held

_STORED = "forage_stored"
_OLD_BUFFER = r"rotary_emb\.inv_freq"
"""Older files hold it; transformers computes it."""
_FILES = ("*.json", "model*.safetensors")


def load_skeleton(path: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """The model of a directory or hub id without its weights, to be read by ``materialize``.

    None where its files do not hold exactly the weights that the model has (another format,
    adapters, experts that transformers puts together, too few or too many): such a model has to be
    loaded whole, which also says what is wrong.
    """
    directory = directory_of(path)
    weights = stored_safetensors(directory) if directory is not None else {}
    if directory is None or not weights:
        return None
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None or not _holds(weights, model):
        return None
    for prefix, module in model.named_modules():
        names = {key: f"{prefix}.{key}" for key in module._parameters}
        found = {key: weights[name] for key, name in names.items() if name in weights}
        if found:
            vars(module)[_STORED] = found
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


def materialize(root: nn.Module) -> None:
    """Read the weights of ``root`` that are still in their files, in place; tied ones stay tied."""
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
    """What a file of ``model`` has to hold, each in its type there, as it is read when asked for.

    What is in memory is given from there. Tied weights are given once.
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
    """Meanwhile weights that were not read lie on the CPU, in no memory and without a value.

    peft puts adapters where it finds the weights that they belong to.
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
            assert blank is not None, "it was put there above"
            weight.requires_grad_(blank.requires_grad)
            module._parameters[key] = weight


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules, whose weights are let go of, or never read: names and shapes stay."""
    return model.to(torch.device("meta"))  # pyright: ignore[reportArgumentType]  # its decorator


def is_skeleton(model: nn.Module) -> bool:
    """Whether weights of ``model`` are still in their files."""
    return any(weight.is_meta for weight in model.parameters())


def _holds(weights: Weights, model: PreTrainedModel) -> bool:
    """Whether files hold each weight of ``model`` as it is there, and no other tensor of it.

    A tied weight may be there twice, if both are the same; what else the model remembers (a
    persistent buffer) is read by nobody here. Names that transformers skips may be there, too.
    """
    own = dict(model.named_parameters())
    for name, weight in own.items():
        if name not in weights or weights[name].shape != weight.shape:
            return False
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict().keys()
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
    """Meanwhile new parameters take no memory; buffers, which no file holds, are computed."""

    thread = threading.get_ident()

    def move(module: nn.Module, name: str, weight: Tensor | None) -> nn.Parameter | None:
        is_another = threading.get_ident() != thread  # the hook is that of all modules
        if is_another or weight is None or weight.is_meta:  # a tied one stays the same object
            return None
        return nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)

    # Its annotation leaves out that a hook may give another parameter.
    hook = register_module_parameter_registration_hook(move)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        hook.remove()


def directory_of(path: str, may_fetch: bool = True) -> Path | None:
    """Where the files of a model are, fetched from the hub if need be; None if they cannot be."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    is_local = not may_fetch or only_downloaded(path)
    try:
        found = snapshot_download(path, allow_patterns=list(_FILES), local_files_only=is_local)
    except Exception:  # of many kinds; whoever loads it whole says what is wrong
        return None
    return Path(found)

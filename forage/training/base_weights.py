"""Which weights a run goes on reading from ``model.path``, by their numbers and not their place.

A checkpoint of adapters holds no base, and a leash without a model of its own (``algorithm.kl``)
ends at the weights that the run started with. Both are read from ``model.path`` again by a resumed
run, where others may lie by then.
"""

from __future__ import annotations

from hashlib import sha256

from forage.config.run_config import RunConfig
from forage.training.checkpoints.saved_weights import ADAPTERS, MODEL
from forage.training.layouts.open_layout import stored_safetensors
from forage.training.lora import base_of
from forage.training.ranks.skeleton import directory_of


def digest_of_base(config: RunConfig) -> str:
    """``digest_of_files`` of ``model.path``; "" where the run reads it at its start alone."""
    leash = config.algorithm.kl
    ends_at_base = leash is not None and leash.reference is None
    return digest_of_files(config.model.path) if config.model.lora or ends_at_base else ""


def digest_of_files(path: str) -> str:
    """Sixteen hexadecimal digits of a model's weights; "" where they are not in safetensors.

    One row of each tensor is read. Adapters count with their base, which they are merged into.
    """
    directory = directory_of(path, may_fetch=False)  # whoever loads the model has fetched it
    if directory is None:
        return ""
    base = base_of(directory)
    digest_below = "" if base is None else digest_of_files(base)
    weights = stored_safetensors(directory, MODEL if base is None else ADAPTERS)
    if not weights or (base is not None and not digest_below):
        return ""
    digest = sha256(digest_below.encode())
    for name in sorted(weights):
        stored = weights[name]
        row = stored.num_rows // 2
        digest.update(f"{name} {stored.shape}".encode())
        digest.update(stored.read_rows(row, row + 1).float().numpy().tobytes())
    return digest.hexdigest()[:16]

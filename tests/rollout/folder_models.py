"""Models that stand-ins for servers load from an update's folders, and their results."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

_LOADING = threading.RLock()
"""Stand-ins are threads, and transformers changes torch for all of them while it loads."""


def load(folder: Path) -> PreTrainedModel:
    """A whole model, or adapters merged into their base, with transformers' own attention."""
    with _LOADING:
        return _load(folder)


def _load(folder: Path) -> PreTrainedModel:
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    assert base is not None, "peft's folders name the base"
    merged = PeftModel.from_pretrained(_load(Path(base)), str(folder)).merge_and_unload()
    assert isinstance(merged, PreTrainedModel)
    return merged


@torch.no_grad()
def logprobs_by(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """The log-probability of each token but the first, from a plain forward pass."""
    logits_TV = model(input_ids=torch.tensor([list(token_ids)])).logits[0]
    targets_T = torch.tensor(token_ids[1:])[:, None]
    return torch.log_softmax(logits_TV[:-1], dim=-1).gather(1, targets_T)[:, 0].tolist()

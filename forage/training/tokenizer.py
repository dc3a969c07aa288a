"""Loading the tokenizer of a model directory; torch is not imported for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forage.config.model_config import ModelConfig
from forage.errors import UserError
from forage.remote.hub import only_downloaded

_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


def load_tokenizer(config: ModelConfig, key: str = "model.path") -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory or hub id; raises ``UserError``, which names ``key``."""
    check_path(config.path, key)
    path = config.path
    while not (Path(path) / "tokenizer.json").is_file() and (base := _base_of(Path(path))):
        path = base  # peft's own directories hold adapters alone
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=only_downloaded(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{key} is {config.path!r}: no tokenizer there ({error})") from error
    if config.endpoint is not None and config.endpoint.form == "chat":
        tokenizer.chat_template = None  # the server writes the chat format
    return cast(PreTrainedTokenizerFast, tokenizer)


def check_path(path: str, key: str) -> None:
    """Refuse what is no directory and cannot be a hub id, instead of asking the hub for it."""
    if path.endswith(".gguf"):
        raise UserError(
            f"{key} is {path!r}, a GGUF file; make a model directory of it first: "
            f"forage import-gguf {path} --out DIR"
        )
    if not _HUB_ID.fullmatch(path) and not Path(path).is_dir():
        raise UserError(
            f"{key} is {path!r}: there is no such directory; forage doctor RECIPE says what a "
            "recipe lacks here"
        )


def _base_of(directory: Path) -> str | None:
    if not (directory / "adapter_config.json").is_file():
        return None
    from forage.training.lora import base_of  # with torch, which peft needs

    return base_of(directory)

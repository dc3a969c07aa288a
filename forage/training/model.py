"""Models in and out: ordinary Hugging Face directories, and one that is made from nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from forage.config import ModelConfig
from forage.environment.actions import PROTOCOL_TAGS
from forage.errors import UserError

# Its bars show parts of a second of loading, in the middle of ours.
disable_progress_bar()

_DIGESTED_NUMBERS = 4096

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory or hub id; raises ``UserError``."""
    _check_path(config.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path is {config.path!r}: no tokenizer there ({error})") from error
    return cast(PreTrainedTokenizerFast, tokenizer)


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The policy's weights on their device; raises ``UserError``."""
    if config.device != "cpu" and not torch.cuda.is_available():
        raise UserError(f"model.device is {config.device!r} but torch sees no GPU; use cpu")
    _check_path(config.path)
    dtype = getattr(torch, config.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(config.path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path is {config.path!r}: no model there ({error})") from error
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        for module in model.modules():
            # transformers asks a layer's training flag too; dropout inside has one of its own.
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
    model.to(torch.device(config.device))  # pyright: ignore[reportArgumentType]  # its decorator
    return model


def load_reference(config: ModelConfig, path: str | None) -> PreTrainedModel:
    """A frozen model beside the policy: of ``path``, or the weights that the run starts with.

    Raises ``UserError`` where it has other tokens than the policy.
    """
    model = _load_beside(config, path, "algorithm.kl.reference")
    model.requires_grad_(False)
    return model


def load_critic_base(config: ModelConfig, path: str | None) -> PreTrainedModel:
    """The model that a critic is made of; raises ``UserError`` as ``load_reference`` does."""
    return _load_beside(config, path, "algorithm.critic.path")


def _load_beside(config: ModelConfig, path: str | None, key: str) -> PreTrainedModel:
    model = load_model(config.model_copy(update={"path": path or config.path}))
    if path is not None:
        mine, its = load_tokenizer(config), load_tokenizer(config.model_copy(update={"path": path}))
        if mine.get_vocab() != its.get_vocab():
            raise UserError(
                f"{key} ({path}) has other tokens than model.path ({config.path}): it would read "
                "other words; name a model of the same family"
            )
    return model


def weights_digest(model: PreTrainedModel) -> str:
    """Sixteen hexadecimal digits of the weights as they are now, whatever file they came from.

    Of each tensor at most some thousand numbers are looked at, spread over it: a step of training
    changes them all, and reading 72 billion would take minutes.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        seen = flat[:: max(1, flat.numel() // _DIGESTED_NUMBERS)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(seen.numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Sixteen hexadecimal digits of the vocabulary, the special tokens and the chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    text = f"{vocabulary}\0{sorted(tokenizer.all_special_tokens)}\0{tokenizer.chat_template}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _check_path(path: str) -> None:
    """Refuse at once what can be no hub id, instead of asking the hub for it."""
    is_local = path.startswith(("/", ".", "~")) or path.count("/") != 1
    if is_local and "/" in path and not Path(path).is_dir():
        raise UserError(f"model.path is {path!r}: there is no such directory")


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write an ordinary Hugging Face directory."""
    cast(PreTrainedModel, model).save_pretrained(out)
    tokenizer.save_pretrained(out)


def new_model(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    max_tokens: int,
    seed: int,
) -> PreTrainedModel:
    """A Qwen2 with random weights: ``hidden_size`` wide, three times that in the feed-forward."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def new_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on ``texts``, digits apart, the protocol's tags as added tokens.

    ``vocab_size`` counts the 256 bytes, the tags and the end of text as well.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(PROTOCOL_TAGS),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(tag, special=False, normalized=False) for tag in PROTOCOL_TAGS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )

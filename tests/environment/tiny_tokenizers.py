"""Byte-level BPE tokenizers of a few hundred tokens, in the variants of real models."""

from __future__ import annotations

from functools import cache
from typing import Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AddedToken, PreTrainedTokenizerFast

from forage.environment.actions import PROTOCOL_TAGS

Shape = Literal["tags_added", "tags_ordinary", "pad_is_eos", "chat", "nfkc", "spaces_added"]
SHAPES: tuple[Shape, ...] = (
    *("tags_added", "tags_ordinary", "pad_is_eos"),
    *("chat", "nfkc", "spaces_added"),
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "Doc 1(Title: Rome) Rome lies on the Tiber.",
    "Question: Which river does the city of Rome lie on?",
    "<think> I should search. </think> <search> Rome </search>",
    "<information> The Tiber is a river. </information> <answer> Tiber </answer>",
]


@cache
def make_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """One variant; ``tags_ordinary`` and the following ones spell the tags as ordinary text."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    base.decoder = decoders.ByteLevel()
    if shape == "nfkc":
        base.normalizer = normalizers.NFKC()
    trainer = BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    base.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>" if shape == "pad_is_eos" else "<|pad|>",
    )
    if shape == "tags_added":
        add_tokens(tokenizer, *PROTOCOL_TAGS)
    if shape == "chat":
        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}  # as Qwen has them
        )
        add_tokens(tokenizer, "<tool_call>")
        tokenizer.chat_template = CHAT_TEMPLATE
    if shape == "spaces_added":
        add_tokens(tokenizer, "  ", "   ", "    ")
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerFast, *contents: str) -> None:
    """Adds tokens that are not special, like Qwen's tool tags."""
    for content in contents:
        tokenizer.add_tokens(AddedToken(content, special=False, normalized=False))

"""Chat formats of many families in a few lines each: which tokens open, end and follow a message.

The control tokens, their order, how the last message ends and whether the assistant's start opens a
thought match the published templates; tools and default texts are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast


@dataclass(frozen=True)
class ChatFamily:
    """``eos`` is the tokenizer's own; ``config_ends`` come from its generation config."""

    special: tuple[str, ...]
    eos: str
    template: str
    ends: frozenset[str]
    """Where sampling must stop."""
    message_end: str | None = None
    """What ends the assistant's message in the template."""
    config_ends: tuple[str, ...] = ()
    opens_thought: bool = False


def _each(message: str, start: str, before: str = "") -> str:
    """A template that writes each message by one rule, and the start of the assistant's message."""
    loop = "{% for m in messages %}" + message + "{% endfor %}"
    return before + loop + "{% if add_generation_prompt %}" + start + "{% endif %}"


_IM = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_IM_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
_R1 = (
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}"
)
_GEMMA = (
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n"
)
_MISTRAL = (
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}"
)
_PHI3 = "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
_PHI4 = "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>"
_GLM = "<|{{ m.role }}|>\n{{ m.content }}"
_GRANITE = "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
_HARMONY = (
    "{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
)

FAMILIES: dict[str, ChatFamily] = {
    "qwen3": ChatFamily(
        _IM_TOKENS, "<|im_end|>", _each(_IM, "<|im_start|>assistant\n"),
        frozenset({"<|im_end|>", "<|endoftext|>"}), "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "qwen3-thinking": ChatFamily(
        _IM_TOKENS, "<|im_end|>", _each(_IM, "<|im_start|>assistant\n<think>\n"),
        frozenset({"<|im_end|>", "<|endoftext|>"}), "<|im_end|>", opens_thought=True,
    ),
    "qwen3-without-thinking": ChatFamily(
        _IM_TOKENS, "<|im_end|>", _each(_IM, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        frozenset({"<|im_end|>", "<|endoftext|>"}), "<|im_end|>",
    ),
    "deepseek-r1": ChatFamily(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        _each(_R1, "<｜Assistant｜><think>\n", "<｜begin▁of▁sentence｜>"),
        frozenset({"<｜end▁of▁sentence｜>"}), "<｜end▁of▁sentence｜>", opens_thought=True,
    ),
    "llama3": ChatFamily(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eom_id|>", "<|eot_id|>"),
        "<|end_of_text|>",
        _each(_HEADER, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|begin_of_text|>"),
        frozenset({"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}), "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "gemma": ChatFamily(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>",
        _each(_GEMMA, "<start_of_turn>model\n", "<bos>"),
        frozenset({"<eos>", "<end_of_turn>"}), "<end_of_turn>", ("<eos>", "<end_of_turn>"),
    ),
    "mistral": ChatFamily(
        ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", _each(_MISTRAL, "", "<s>"),
        frozenset({"</s>"}), "</s>",
    ),
    "phi3": ChatFamily(
        ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"), "<|endoftext|>",
        _each(_PHI3, "<|assistant|>\n"),
        frozenset({"<|endoftext|>", "<|end|>"}), "<|end|>",
        ("<|endoftext|>", "<|end|>", "<|assistant|>")[:2],
    ),
    "phi4": ChatFamily(
        ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"), "<|endoftext|>",
        _each(_PHI4, "<|im_start|>assistant<|im_sep|>"),
        frozenset({"<|endoftext|>", "<|im_end|>"}), "<|im_end|>",
    ),
    "glm4": ChatFamily(
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
         "<|observation|>"),
        "<|endoftext|>", _each(_GLM, "<|assistant|>\n", "[gMASK]<sop>"),
        frozenset({"<|endoftext|>", "<|user|>", "<|observation|>"}), None,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "smollm3": ChatFamily(
        ("<|end_of_text|>", "<|im_start|>", "<|im_end|>"), "<|end_of_text|>",
        _each(_IM, "<|im_start|>assistant\n"),
        frozenset({"<|end_of_text|>", "<|im_end|>"}), "<|im_end|>",
    ),
    "granite": ChatFamily(
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), "<|end_of_text|>",
        _each(_GRANITE, "<|start_of_role|>assistant<|end_of_role|>"),
        frozenset({"<|end_of_text|>"}), "<|end_of_text|>",
    ),
    "gpt-oss": ChatFamily(
        ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>",
         "<|message|>", "<|call|>"),
        "<|return|>", _each(_HARMONY, "<|start|>assistant"),
        # Not <|end|>, which also ends the analysis: the answer follows in the same turn.
        frozenset({"<|return|>", "<|endoftext|>", "<|call|>"}), "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "exaone": ChatFamily(
        ("[BOS]", "[|endofturn|]", "[|user|]", "[|assistant|]"), "[|endofturn|]",
        _each("[|{{ m.role }}|]{{ m.content }}[|endofturn|]\n", "[|assistant|]"),
        frozenset({"[|endofturn|]"}), "[|endofturn|]",
    ),
    "command-r": ChatFamily(
        ("<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        "<EOS_TOKEN>",
        _each("<|START_OF_TURN_TOKEN|>{{ m.role }}{{ m.content }}<|END_OF_TURN_TOKEN|>",
              "<|START_OF_TURN_TOKEN|>assistant", "<BOS_TOKEN>"),
        frozenset({"<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"}), "<|END_OF_TURN_TOKEN|>",
    ),
}  # fmt: skip


def save_chat_tokenizer(name: str, out: Path, has_config: bool = True) -> PreTrainedTokenizerFast:
    """The tokenizer of a family (a token per byte, and its control tokens), written and read."""
    family = FAMILIES[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=family.eos)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(out)
    if has_config and family.config_ends:
        ids = tokenizer.convert_tokens_to_ids(list(family.config_ends))
        (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return AutoTokenizer.from_pretrained(out)

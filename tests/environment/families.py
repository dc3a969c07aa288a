"""The chat formats of three model families, on tokenizers and models of a few thousand parameters.

The templates follow the published rules of each family (control tokens, separators, positions of
tools and their results, treatment of reasoning); their instructions are our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import (
    AddedToken,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Name = Literal["qwen2.5", "qwen2.5-base", "qwen3", "qwen3-base", "llama3", "llama3-base"]
NAMES: tuple[Name, ...] = ("qwen2.5", "qwen2.5-base", "qwen3", "qwen3-base", "llama3")
"""Families with a chat template, including Qwen's base models."""

# Tools in the system message; a default system message; consecutive results in one user message.
QWEN25 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'Be helpful.' }}
    {%- endif %}
    {{- '\n\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nTo call one:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n' }}
    {{- '</tool_call><|im_end|>\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nBe helpful.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
           or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# No default system message. Reasoning is stripped from turns before the last question of the user
# (tool results do not count as questions), and rewritten with its own line breaks in later ones.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nTo call one:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n' }}
    {{- '</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(is_looking=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.is_looking and message.role == 'user'
           and not (message.content.startswith('<tool_response>')
                    and message.content.endswith('</tool_response>')) %}
        {%- set ns.is_looking = false %}
        {%- set ns.last_query = (messages | length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
            {%- set reasoning = message.content.split('</think>')[0].rstrip('\n')
                                .split('<think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning.strip('\n') }}
            {{- '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# The date in the system message; tools in the first user message; one bare call per turn; results
# under the role ipython, written as JSON; contents trimmed.
LLAMA3 = r"""
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}
        {%- set date_string = '26 Jul 2024' %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}
    {{- 'Environment: ipython\n' }}
{%- endif %}
{{- 'Today Date: ' + date_string + '\n\n' + system_message + '<|eot_id|>' }}
{%- if tools %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {{- 'To call a function: {"name": NAME, "parameters": OBJECT}\n\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\n\n' }}
    {%- endfor %}
    {{- first_user_message + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Family:
    """The differences between families: tokens, the one that ends a text, and the template."""

    special: tuple[str, ...]
    added: tuple[str, ...]
    eos: str
    pad: str | None
    template: str | None
    end_of_turn: str


_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALL = ("<tool_call>", "</tool_call>")
_QWEN3_ADDED = (*_CALL, "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)
FAMILIES: dict[Name, Family] = {
    "qwen2.5": Family(_QWEN_SPECIAL, _CALL, "<|im_end|>", "<|endoftext|>", QWEN25, "<|im_end|>"),
    # pad == eos, and the end of a text differs from the end of a turn.
    "qwen2.5-base": Family(
        _QWEN_SPECIAL, _CALL, "<|endoftext|>", "<|endoftext|>", QWEN25, "<|im_end|>"
    ),
    "qwen3": Family(
        _QWEN_SPECIAL, _QWEN3_ADDED, "<|im_end|>", "<|endoftext|>", QWEN3, "<|im_end|>"
    ),
    "qwen3-base": Family(
        _QWEN_SPECIAL, _QWEN3_ADDED, "<|endoftext|>", "<|endoftext|>", QWEN3, "<|im_end|>"
    ),
    # pad == eos, as its users set it: the family has no padding token of its own.
    "llama3": Family(_LLAMA_SPECIAL, (), "<|eot_id|>", "<|eot_id|>", LLAMA3, "<|eot_id|>"),
    # Neither a chat template nor a padding token.
    "llama3-base": Family(_LLAMA_SPECIAL, (), "<|end_of_text|>", None, None, "<|end_of_text|>"),
}

_TEXTS = [
    "Doc 1(Title: Rome) Rome lies on the river Tiber.",
    "<think>\nWhere is it?\n</think>\n\n<search> Rome </search> <answer> Tiber </answer>",
    '{"name": "search", "arguments": {"query_list": ["Rome"]}, "parameters": {}}',
    "Question: Which river is the city of Rome on?",
    "system user assistant ipython tool function description string array type object items",
]


@cache
def family_tokenizer(name: Name) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred tokens with the family's control tokens and template."""
    family = FAMILIES[name]
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    base.train_from_iterator(_TEXTS, trainer)
    names: dict[str, Any] = {"eos_token": family.eos, "pad_token": family.pad}
    if name.startswith("llama3"):
        names["bos_token"] = "<|begin_of_text|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    for content in family.added:
        tokenizer.add_tokens(AddedToken(content, special=False, normalized=False))
    if name.startswith("llama3"):
        bos = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
        )
    tokenizer.chat_template = family.template
    return tokenizer


# The rescaled frequencies of Llama 3.1 and later, with a context so short that it matters here.
LLAMA3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
_SPARE_ROWS = 24


@cache
def family_model(name: Name) -> PreTrainedModel:
    """Two layers with random weights, in the family's own architecture.

    Its embeddings have rows for ids that the tokenizer does not know, as in Qwen. The instruct
    models tie them to the head, like the small models of each family; the base models do not.
    """
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": len(family_tokenizer(name)) + _SPARE_ROWS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "tie_word_embeddings": not name.endswith("-base"),
    }
    if name.startswith("qwen3"):
        return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16)).eval()
    if name.startswith("llama3"):
        return LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=LLAMA3_ROPE)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()

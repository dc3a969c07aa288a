"""The prompt of an episode: a template around the question, as tokens.

The first segment of each transcript comes from here. The template and the tokenizer's chat format
are our own words; the question is somebody else's, and is encoded so that it can end no message
and open no tag. What the policy does with the prompt is none of this file's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from forage.environment.chat import ToolSchema, render
from forage.environment.codec import Codec
from forage.environment.template import SLOT, PromptTemplate
from forage.errors import UserError
from forage.types import Question

# Stands for the question while the chat format is applied; no template contains it by chance.
_PLACEHOLDER = "QUESTIONx7Kq29GOESxHERE"


def encode_prompt(
    question: Question,
    codec: Codec,
    tokenizer: PreTrainedTokenizerFast,
    template: PromptTemplate,
    max_tokens: int,
    tools: Sequence[ToolSchema] = (),
) -> list[int]:
    """The prompt's tokens, in the tokenizer's chat format where it has one, ``tools`` described.

    A question without a question mark gets one. Raises ``UserError`` for a prompt of more than
    ``max_tokens`` tokens: cutting it would ask something else.
    """
    before, after = _around_the_question(tokenizer, template, tools)
    ids = [
        *_leading_ids(tokenizer),
        *codec.encode_trusted(before.rstrip()),
        *codec.encode_untrusted(_with_neighbouring_space(before, _asked(question.text), after)),
        *codec.encode_trusted(after.lstrip()),
    ]
    if len(ids) > max_tokens:
        raise UserError(
            f"the prompt of question {question.id} has {len(ids)} tokens and the budget is "
            f"{max_tokens}; raise environment.max_tokens, or leave the question out"
        )
    return ids


def _asked(text: str) -> str:
    text = text.strip()
    return text if text.endswith(("?", "？")) else text + "?"


def _with_neighbouring_space(before: str, text: str, after: str) -> str:
    """The question with the white space on both sides of it.

    Most tokenizers join a space to the word that follows and a line break to the mark before it:
    encoded apart from the question they would give tokens that the model has rarely seen.
    """
    leading = before[len(before.rstrip()) :]
    trailing = after[: len(after) - len(after.lstrip())]
    return leading + text + trailing


def _around_the_question(
    tokenizer: PreTrainedTokenizerFast, template: PromptTemplate, tools: Sequence[ToolSchema]
) -> tuple[str, str]:
    """The text before and after the question, chat format included."""
    if not tokenizer.chat_template:
        before, _, after = template.text.partition(SLOT)
        return before, after
    message = {"role": "user", "content": template.text.replace(SLOT, _PLACEHOLDER)}
    rendered = render(tokenizer, [message], tools)
    if rendered.count(_PLACEHOLDER) != 1:
        raise UserError(
            "the tokenizer's chat template shows the user's message "
            f"{rendered.count(_PLACEHOLDER)} times; it must show it once"
        )
    before, _, after = rendered.partition(_PLACEHOLDER)
    return before, after


def _leading_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The beginning-of-text token, where the tokenizer puts one and no chat format writes it."""
    bos = tokenizer.bos_token_id
    if tokenizer.chat_template or not isinstance(bos, int):
        return []
    return [bos] if tokenizer.encode("", add_special_tokens=True)[:1] == [bos] else []

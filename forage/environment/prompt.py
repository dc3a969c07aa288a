"""Prompts as tokens, in the tokenizer's chat format: texts of ours with places for those of others.

The first segment of each transcript comes from here; the baselines' prompts hold passages and
reasoning besides the question. What is ours is encoded as trusted; what is filled in opens no tag,
ends no message and emits no control token, whatever it holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from forage.environment.chat import ToolSchema, render
from forage.environment.codec import Codec
from forage.environment.template import PromptTemplate
from forage.errors import UserError
from forage.types import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Filling = str | tuple[int, ...]
"""A text of somebody else's, or tokens that were made harmless already."""

# Stand for the places while the chat format is applied; no template contains one by chance.
_PLACE = re.compile(r"PLACEx7Kq29GOES([a-z]+)xHERE")


def fill(
    template: str,
    fillings: Mapping[str, Filling],
    codec: Codec,
    tools: Sequence[ToolSchema] = (),
    system: str = "",
) -> list[int]:
    """``template`` with each ``{name}`` of ``fillings`` filled in, as one message of the user.

    ``tools`` are described in the chat format, and ``system`` is a message before the user's;
    without a chat format the prompt is the text itself. The white space
    on both sides of a text is encoded with it: most tokenizers join a space to the word that
    follows and a line break to the mark before it, and apart from the text they would give tokens
    that the model has rarely seen.
    Raises ``UserError`` for a chat template that does not show the message once, and for a system
    message without a place.
    """
    ours, *rest = _PLACE.split(_with_places(template, fillings, codec.tokenizer, tools, system))
    ids = _leading_ids(codec.tokenizer)
    for name, after in zip(rest[0::2], rest[1::2], strict=True):
        filling = fillings[name]
        if isinstance(filling, str):
            leading = ours[len(ours.rstrip()) :]
            trailing = after[: len(after) - len(after.lstrip())]
            ids += codec.encode_trusted(ours.rstrip())
            ids += codec.encode_untrusted(leading + filling + trailing)
            ours = after.lstrip()
        else:
            ids += [*codec.encode_trusted(ours), *filling]
            ours = after
    return ids + codec.encode_trusted(ours)


def _with_places(
    template: str,
    fillings: Mapping[str, Filling],
    tokenizer: PreTrainedTokenizerFast,
    tools: Sequence[ToolSchema],
    system: str,
) -> str:
    """The template in the chat format, a placeholder in each place."""
    text = template
    for name in fillings:
        text = text.replace(f"{{{name}}}", f"PLACEx7Kq29GOES{name}xHERE")
    if not tokenizer.chat_template:
        if system:
            raise UserError(
                "this tokenizer has no chat template, and so no place for "
                "environment.system_message; remove it, or write it into the prompt"
            )
        return text
    messages = [{"role": "system", "content": system}] if system else []
    rendered = render(tokenizer, [*messages, {"role": "user", "content": text}], tools)
    if system and system.strip() not in rendered:
        raise UserError(
            "the tokenizer's chat template leaves the system message out; remove "
            "environment.system_message, or write it into the prompt"
        )
    num_times = len(_PLACE.findall(rendered)) / len(_PLACE.findall(text))
    if num_times != 1:
        raise UserError(
            f"the tokenizer's chat template shows the user's message {num_times:g} times; it must "
            "show it once"
        )
    return rendered


def _leading_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The beginning-of-text token, where the tokenizer puts one and no chat format writes it."""
    bos = tokenizer.bos_token_id
    if tokenizer.chat_template or not isinstance(bos, int):
        return []
    return [bos] if tokenizer.encode("", add_special_tokens=True)[:1] == [bos] else []


def encode_prompt(
    question: Question,
    codec: Codec,
    template: PromptTemplate,
    max_tokens: int,
    tools: Sequence[ToolSchema] = (),
    system: str = "",
    adds_question_mark: bool = True,
) -> list[int]:
    """The template with the question in it, as tokens; one without a question mark may get one.

    Raises ``UserError`` for more than ``max_tokens`` tokens: cutting would ask something else.
    """
    text = asked(question.text) if adds_question_mark else question.text
    ids = fill(template.text, {"question": text}, codec, tools, system)
    check_length(ids, question, max_tokens)
    return ids


def asked(text: str) -> str:
    """The question's text, with a question mark at its end."""
    text = text.strip()
    return text if text.endswith(("?", "？")) else text + "?"


def check_length(ids: Sequence[int], question: Question, max_tokens: int) -> None:
    """Raises ``UserError`` for a prompt that leaves no room."""
    if len(ids) > max_tokens:
        raise UserError(
            f"the prompt of question {question.id} has {len(ids)} tokens and the budget is "
            f"{max_tokens}; raise environment.max_tokens, or leave the question out"
        )

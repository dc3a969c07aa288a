"""The prompt of an episode: a template around the question, as tokens.

The first segment of each transcript comes from here. The template and the tokenizer's chat format
are our own words; the question is somebody else's, and is encoded so that it can end no message
and open no tag. What the policy does with the prompt is none of this file's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from forage.environment.chat import ToolSchema
from forage.environment.codec import Codec
from forage.environment.filling import fill
from forage.environment.template import PromptTemplate
from forage.errors import UserError
from forage.types import Question


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
    ids = fill(template.text, {"question": asked(question.text)}, codec, tokenizer, tools)
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

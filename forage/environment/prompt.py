"""The prompt of an episode: a template around the question, as tokens.

The first segment of each transcript comes from here. The template and the tokenizer's chat format
are our own words; the question is somebody else's, and is encoded so that it can end no message
and open no tag. What the policy does with the prompt is none of this file's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Self

from transformers import PreTrainedTokenizerFast

from forage.environment.codec import Codec
from forage.errors import UserError
from forage.types import Question

BUILT_IN = ("search-r1", "brief")
_SLOT = "{question}"
# Stands for the question while the chat format is applied; no template contains it by chance.
_PLACEHOLDER = "QUESTIONx7Kq29GOESxHERE"


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text with one ``{question}`` in it; other braces mean nothing."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if self.text.count(_SLOT) != 1:
            raise UserError(
                f"the prompt template {self.name} holds {_SLOT} {self.text.count(_SLOT)} times; "
                "write it exactly once, where the question belongs"
            )

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """A built-in template by name, or one from a file; raises ``UserError``."""
        if name_or_path in BUILT_IN:
            folder = resources.files("forage.environment") / "prompts"
            text = (folder / f"{name_or_path}.txt").read_text(encoding="utf-8")
            return cls(str(name_or_path), text)
        try:
            return cls(str(name_or_path), Path(name_or_path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"environment.prompt is {str(name_or_path)!r}, which is neither a built-in "
                f"template ({', '.join(BUILT_IN)}) nor a readable file: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"the prompt template {name_or_path} is not UTF-8 text") from error


def encode_prompt(
    question: Question,
    codec: Codec,
    tokenizer: PreTrainedTokenizerFast,
    template: PromptTemplate,
    max_tokens: int,
) -> list[int]:
    """The prompt's tokens, in the tokenizer's chat format where it has one.

    A question without a question mark gets one. Raises ``UserError`` for a prompt of more than
    ``max_tokens`` tokens: cutting it would ask something else.
    """
    before, after = _around_the_question(tokenizer, template)
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
    tokenizer: PreTrainedTokenizerFast, template: PromptTemplate
) -> tuple[str, str]:
    """The text before and after the question, chat format included."""
    if not tokenizer.chat_template:
        before, _, after = template.text.partition(_SLOT)
        return before, after
    message = {"role": "user", "content": template.text.replace(_SLOT, _PLACEHOLDER)}
    rendered = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert isinstance(rendered, str), "an untokenised chat template gives text"
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

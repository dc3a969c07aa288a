"""The published settings of known encoder families, for models whose own files lack them.

What a model's files say comes first, and what the user says before that; see
``forage.retrieval.vectors.sentence_encoder``. A model is recognised by its id (or its directory's
name).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forage.retrieval.vectors.encoder import QUOTED_TITLE, Pooling

_ASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of a family were trained to be used."""

    name: str
    pattern: str
    pooling: Pooling
    normalise: bool
    query_prefix: str = ""
    passage_prefix: str = ""
    passage_template: str = QUOTED_TITLE


# The first pattern that is found decides, so the special stands before the general.
_FAMILIES = (
    # https://huggingface.co/intfloat/e5-mistral-7b-instruct
    Family("E5 Mistral", r"e5-mistral", "lasttoken", True, f"Instruct: {_ASK}\nQuery: "),
    # https://huggingface.co/intfloat/multilingual-e5-large-instruct
    Family("E5 instruct", r"\be5-.*instruct", "mean", True, f"Instruct: {_ASK}\nQuery: "),
    # https://huggingface.co/intfloat/e5-base-v2
    Family("E5", r"\be5-", "mean", True, "query: ", "passage: "),
    # https://huggingface.co/BAAI/bge-m3
    Family("BGE M3", r"\bbge-m3", "cls", True),
    # https://huggingface.co/BAAI/bge-base-zh-v1.5
    Family("BGE zh", r"\bbge-.*-zh", "cls", True, "为这个句子生成表示以用于检索相关文章："),
    # https://huggingface.co/BAAI/bge-base-en-v1.5
    Family(
        "BGE",
        r"\bbge-",
        "cls",
        True,
        "Represent this sentence for searching relevant passages: ",
    ),
    # https://huggingface.co/facebook/contriever
    Family("Contriever", r"contriever", "mean", False),
    # https://arxiv.org/abs/2004.04906: [CLS] of "title [SEP] text", inner product
    Family("DPR", r"\bdpr-(ctx|question)", "cls", False, passage_template="{title} [SEP] {text}"),
    # https://huggingface.co/Qwen/Qwen3-Embedding-0.6B
    Family("Qwen3", r"qwen3-embedding", "lasttoken", True, f"Instruct: {_ASK}\nQuery:"),
    # https://huggingface.co/Alibaba-NLP/gte-Qwen2-7B-instruct
    Family("GTE Qwen", r"\bgte-qwen", "lasttoken", True, f"Instruct: {_ASK}\nQuery: "),
    # https://huggingface.co/Alibaba-NLP/gte-base-en-v1.5 and gte-modernbert-base
    Family("GTE v1.5", r"\bgte-(modernbert|.*-v1\.5|multilingual)", "cls", True),
    # https://huggingface.co/thenlper/gte-base
    Family("GTE", r"\bgte-", "mean", True),
    # https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2
    Family("MiniLM", r"minilm", "mean", True),
)

_QUESTION_ENCODERS = (
    ("dpr-ctx_encoder", "dpr-question_encoder"),
    ("dpr-ctx-encoder", "dpr-question-encoder"),
)


def family_of(model: str) -> Family | None:
    """The family of a model, by its id or its directory's name; None where none is known."""
    name = model.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    for family in _FAMILIES:
        if re.search(family.pattern, name):
            return family
    return None


def question_encoder_of(model: str) -> str | None:
    """The id of the encoder that a passage encoder of DPR was trained with, else None."""
    for passages, queries in _QUESTION_ENCODERS:
        if passages in model:
            return model.replace(passages, queries)
    return None

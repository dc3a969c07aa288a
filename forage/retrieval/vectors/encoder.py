"""What turns texts into vectors: the protocol, and the settings that belong to an index.

Pooling, prefixes and normalisation are part of what an index is made of. They are decided once,
when it is built (``forage.retrieval.vectors.sentence_encoder``), written into its manifest as an
``EncoderSpec``, and taken from there when it is served. Nothing here loads a model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from forage.errors import UserError
from forage.types import Passage

Dtype = Literal["float32", "float16", "bfloat16"]
Pooling = Literal["mean", "cls", "lasttoken", "max", "own"]

QUOTED_TITLE = '"{title}"\n{text}'

_PLACEHOLDER = re.compile(r"\{(title|text)\}")  # not str.format: braces in a title are text
_NAMED_IDS = 5


class EncoderSpec(BaseModel):
    """A model and everything that decides which vector it gives a text.

    ``pooling`` is "own" where the model's modules do something that no option describes.
    ``fingerprint`` is a digest of the model's files, ``revision`` a commit of the hub (None for a
    local directory). ``query_model`` is the encoder of queries where it is another one (DPR).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    revision: str | None
    fingerprint: str
    query_model: str | None = None
    query_revision: str | None = None
    query_fingerprint: str | None = None
    pooling: Pooling
    query_prefix: str
    passage_prefix: str
    passage_template: str
    normalise: bool
    max_length: int = Field(ge=1)
    dimension: int = Field(ge=1)
    dtype: Dtype
    onnx_file: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """What the user says about an encoder; None leaves it to the model's files, then its family."""

    model: str
    revision: str | None = None
    query_model: str | None = None
    query_revision: str | None = None
    pooling: Pooling | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    passage_template: str | None = None
    normalise: bool | None = None
    max_length: int | None = None
    dtype: Dtype | None = None
    onnx_file: str | None = None
    trust_remote_code: bool = False


class Encoder(Protocol):
    """Texts to vectors; called from one thread at a time."""

    @property
    def spec(self) -> EncoderSpec: ...

    @property
    def dimension(self) -> int: ...

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [B, D], prefixed and normalised as the spec says; B may be 0."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [B, D]; ``texts`` come from ``passage_text``."""
        ...


def choice_of(spec: EncoderSpec) -> EncoderChoice:
    """The choice that leads to ``spec`` again."""
    return EncoderChoice(
        **spec.model_dump(exclude={"fingerprint", "query_fingerprint", "dimension"})
    )


def passage_text(template: str, passage: Passage) -> str:
    """What is encoded of a passage: the template filled in, the text alone where it has no title.

    ``'"{title}"\\n{text}'`` and ("Ada", "Born 1815.") give ``'"Ada"\\nBorn 1815.'``.
    """
    if not passage.title:
        return passage.text
    values = {"title": passage.title, "text": passage.text}
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def check_template(template: str) -> None:
    """Raise ``UserError`` unless ``{text}`` occurs once and ``{title}`` at most once."""
    found = _PLACEHOLDER.findall(template)
    if found.count("text") != 1 or found.count("title") > 1:
        raise UserError(
            f"the passage template {template!r} needs {{text}} once and {{title}} at most once"
        )


def bad_rows(vectors_BD: np.ndarray) -> list[int]:
    """The rows that hold NaN or infinity."""
    return np.flatnonzero(~np.isfinite(vectors_BD).all(axis=1)).tolist()


def require_finite(vectors_BD: np.ndarray, ids: Sequence[str], spec: EncoderSpec) -> None:
    """Raise ``UserError`` that names the passages whose vectors hold NaN or infinity."""
    wrong = bad_rows(vectors_BD)
    if not wrong:
        return
    named = ", ".join(repr(ids[row]) for row in wrong[:_NAMED_IDS])
    more = f" and {len(wrong) - _NAMED_IDS} more" if len(wrong) > _NAMED_IDS else ""
    raise UserError(
        f"{spec.model} in {spec.dtype} gave vectors with NaN or infinity for the passages {named}"
        f"{more}; float16 overflows in some models: try --dtype bfloat16 or --dtype float32"
    )

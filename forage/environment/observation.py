"""What the environment tells the policy after a turn, as tokens within a budget.

Retrieved text goes in through the codec's untrusted door, passage by passage; the frame around it
is our own and always complete. The text of an observation is what its tokens decode to, so the
record shows what the policy saw. Which observation a turn gets is decided in the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forage.environment.actions import (
    INFORMATION_CLOSE,
    INFORMATION_OPEN,
    INVALID_ACTION_MESSAGE,
)
from forage.environment.codec import Codec
from forage.errors import UserError
from forage.types import Hit

__all__ = [
    "Codec",
    "Observation",
    "build_observation",
    "empty_observation",
    "failed_observation",
    "invalid_observation",
]

_OPENING = f"\n\n{INFORMATION_OPEN}"
_CLOSING = f"{INFORMATION_CLOSE}\n\n"
_NOTHING_FOUND = "Nothing was found.\n"
_SEARCH_FAILED = "The search failed.\n"
# A remnant shorter than this holds a passage's head and nothing to read: it is left out.
_MIN_REMNANT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """Tokens that follow a turn, the text they decode to, and the passages shown in them."""

    token_ids: tuple[int, ...]
    text: str
    passage_ids: tuple[str, ...] = ()


def build_observation(hits: Sequence[Hit], codec: Codec, max_tokens: int) -> Observation:
    """The passages, best first, in an information block of at most ``max_tokens`` tokens.

    A passage that does not fit is cut, and those after it are left out. Without hits it is the
    observation of a search that found nothing. Raises ``UserError`` for a budget below the frame.
    """
    if not hits:
        return empty_observation(codec, max_tokens)
    room = _room(codec, max_tokens)
    body: list[int] = []
    shown: list[str] = []
    for number, hit in enumerate(hits, start=1):
        passage = hit.passage
        text = f"Doc {number}(Title: {passage.title}) {passage.text}\n"
        # The whole budget, not the rest of it, so that the codec's cache sees the same text again.
        ids = codec.encode_untrusted(text, max_tokens)
        left = room - len(body)
        kept = ids if len(ids) <= left else codec.cut(ids, left)
        if kept and (len(kept) == len(ids) or not shown or left >= _MIN_REMNANT_TOKENS):
            body += kept
            shown.append(passage.id)
        if len(kept) < len(ids):
            break
    return _framed(body, codec, tuple(shown))


def empty_observation(codec: Codec, max_tokens: int) -> Observation:
    """What a search that found nothing shows; also what the closed-book arms show."""
    return _fixed(_NOTHING_FOUND, codec, max_tokens)


def failed_observation(codec: Codec, max_tokens: int) -> Observation:
    """What a search that failed for good shows, whatever the reason."""
    return _fixed(_SEARCH_FAILED, codec, max_tokens)


def invalid_observation(codec: Codec, max_tokens: int) -> Observation:
    """The fixed message after a turn without an action, cut where the budget ends."""
    ids = codec.cut(codec.encode_trusted(INVALID_ACTION_MESSAGE), max_tokens)
    return Observation(tuple(ids), codec.decode(ids))


def _fixed(text: str, codec: Codec, max_tokens: int) -> Observation:
    body = codec.cut(codec.encode_trusted(text), _room(codec, max_tokens))
    return _framed(body, codec, ())


def _framed(body: list[int], codec: Codec, passage_ids: tuple[str, ...]) -> Observation:
    ids = [*codec.encode_trusted(_OPENING), *body, *codec.encode_trusted(_CLOSING)]
    return Observation(tuple(ids), codec.decode(ids), passage_ids)


def _room(codec: Codec, max_tokens: int) -> int:
    """Tokens left for what stands between the tags; raises ``UserError`` if there are none."""
    frame = len(codec.encode_trusted(_OPENING)) + len(codec.encode_trusted(_CLOSING))
    if max_tokens < frame:
        raise UserError(
            f"environment.max_observation_tokens is {max_tokens}, but this tokenizer needs "
            f"{frame} for the information tags alone; raise it, to hold the passages as well"
        )
    return max_tokens - frame

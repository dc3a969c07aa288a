"""Checks whether the passages that a turn's search showed contain a golden answer.

This is the only place where rewards read an observation: for ``scoring``'s retrieval term and the
bonus of turn-level credit. The environment's text around passages is excluded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from forage.rewards.answers import holds_answer
from forage.types import Turn

# Passages are surrounded by tags or a chat message's markers, which they cannot contain. If these
# were included, "Doc 1" would match the golden answer "1", and the next turn's header "assistant".
_FRAME = re.compile(
    r"</?(?:information|tool_response|think)>|<\|\w+\|>(?:assistant|user|tool|ipython)?"
)
_PASSAGE_HEAD = re.compile(r"^Doc \d+\(Title: ", re.MULTILINE)


def shows_an_answer(turn: Turn, golden_answers: Sequence[str]) -> bool:
    """Whether the turn showed passages that contain a golden answer, both normalised."""
    if not turn.passage_ids_K:  # no search, or one that found nothing
        return False
    return holds_answer(_PASSAGE_HEAD.sub("", _body(turn.observation)), golden_answers)


def _body(observation: str) -> str:
    """The passages as text; Llama's format has them as one JSON string."""
    body = _FRAME.sub("\n", observation).strip()
    if body[:1] == '"' == body[-1:]:
        try:
            return str(json.loads(body, strict=False))
        except ValueError:
            return body  # truncated inside an escape: returned unchanged
    return body

"""Whether the passages that a turn's search showed hold a golden answer.

The one place where rewards read an observation: ``scoring``'s retrieval term and the bonus of
turn-level credit ask it. What the environment writes around passages is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from forage.rewards.answers import holds_answer
from forage.types import Turn

# Around passages stand tags or a message of the chat format, and passages can hold none of it. Left
# in, "Doc 1" would hold the golden answer "1", and the start of the next turn "assistant".
_FRAME = re.compile(
    r"</?(?:information|tool_response|think)>|<\|\w+\|>(?:assistant|user|tool|ipython)?"
)
_PASSAGE_HEAD = re.compile(r"^Doc \d+\(Title: ", re.MULTILINE)


def shows_an_answer(turn: Turn, golden_answers: Sequence[str]) -> bool:
    """Whether the turn brought up passages that hold some golden answer, both normalised."""
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
            return body  # cut inside an escape: as it is
    return body

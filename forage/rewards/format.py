"""Whether an episode kept to the protocol: ``think (search information think)* answer``.

Judged on what the policy wrote, turn by turn; an observation counts only through its place (it
stands after each search), never through its text. ``scoring`` turns the verdict into points.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forage.types import ActionKind, Turn

_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_SEARCH_TURN = ["<think>", "</think>", "<search>", "</search>"]
_ANSWER_TURN = ["<think>", "</think>", "<answer>", "</answer>"]


def is_format_valid(turns: Sequence[Turn]) -> bool:
    """Whether the turns are searches (each observed), then one answer, all well formed.

    Tags balance, are not nested and stand in order; white space alone lies between blocks and
    after ``</answer>``. An invalid action, or a query that was never run, breaks the format.
    """
    if not turns:
        return False
    *searches, last = turns
    return _is_turn(last, ActionKind.ANSWER, _ANSWER_TURN) and all(
        bool(turn.observation) and _is_turn(turn, ActionKind.SEARCH, _SEARCH_TURN)
        for turn in searches
    )


def is_reasoning_broken(sampled: str) -> bool:
    """Whether a think block of a turn is left open, nested, closed twice, or holds another tag.

    A turn without a think block breaks nothing: prompts differ in what they ask for.
    """
    is_thinking = False
    for tag in _TAG.findall(sampled):
        if is_thinking != (tag == "</think>"):
            return True
        is_thinking = tag == "<think>"
    return is_thinking


def _is_turn(turn: Turn, kind: ActionKind, expected_tags: list[str]) -> bool:
    """Whether the sampled text is exactly one think block and one block of the action.

    Splitting at tags gives ``between, tag, inside, tag, between, tag, inside, tag, between``.
    """
    pieces = _TAG.split(turn.sampled)
    outside = pieces[0::4]
    return (
        turn.kind is kind
        and pieces[1::2] == expected_tags
        and not any(text.strip() for text in outside)
    )

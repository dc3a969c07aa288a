"""Whether an episode kept to the protocol: ``think (search information think)* answer``.

Judged on what the policy wrote, turn by turn; an observation counts only through its place (it
stands after each search), never through its text. ``scoring`` turns the verdict into points.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

from forage.types import ActionKind, Turn

ProtocolName = Literal["tags", "tools"]

_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_ANY_TAG = re.compile(r"(</?(?:think|search|information|answer|tool_call|tool_response)>)")
_THOUGHT = ["<think>", "</think>"]
_SEARCH = ["<search>", "</search>"]
_CALL = ["<tool_call>", "</tool_call>"]
_ANSWER = ["<answer>", "</answer>"]
_BARE_CALL = re.compile(r'\{\s*"name"\s*:')
_END_OF_TURN = re.compile(r"\s*(?:<\|\w+\|>\s*)?")


def is_format_valid(turns: Sequence[Turn], protocol: ProtocolName = "tags") -> bool:
    """Whether the turns are searches (each observed), then one answer, all well formed.

    Tags: they balance, are not nested and stand in order, with a thought in each turn; white space
    alone lies between blocks and after ``</answer>``. Tools: each turn may think, in a think block
    or in plain words, and ends with its one call or answer. Under both an invalid action, or a
    query that was never run, breaks the format.
    """
    if not turns:
        return False
    is_well_formed = _is_tags_turn if protocol == "tags" else _is_tools_turn
    *searches, last = turns
    return is_well_formed(last, ActionKind.ANSWER) and all(
        bool(turn.observation) and is_well_formed(turn, ActionKind.SEARCH) for turn in searches
    )


def is_reasoning_broken(sampled: str) -> bool:
    """Whether a think block of a turn is left open, nested, closed twice, or holds another tag.

    A turn without a think block breaks nothing: prompts differ in what they ask for.
    """
    is_thinking = False
    for tag in _ANY_TAG.findall(sampled):
        if is_thinking != (tag == "</think>"):
            return True
        is_thinking = tag == "<think>"
    return is_thinking


def _is_tags_turn(turn: Turn, kind: ActionKind) -> bool:
    """Whether the sampled text is exactly one think block and one block of the action.

    Splitting at tags gives ``between, tag, inside, tag, between, tag, inside, tag, between``.
    """
    pieces = _TAG.split(turn.sampled)
    outside = pieces[0::4]
    return (
        turn.kind is kind
        and pieces[1::2] == _THOUGHT + (_ANSWER if kind is ActionKind.ANSWER else _SEARCH)
        and not any(text.strip() for text in outside)
    )


def _is_tools_turn(turn: Turn, kind: ActionKind) -> bool:
    """Whether a call or an answer stands at the end, behind one think block at most.

    A bare call, as Llama writes it, is followed by the end-of-turn token.
    """
    pieces = _ANY_TAG.split(turn.sampled)
    tags = pieces[1::2]
    action = tags[2:] if tags[:2] == _THOUGHT else tags
    if turn.kind is not kind:
        return False
    if action == (_ANSWER if kind is ActionKind.ANSWER else _CALL):
        return _END_OF_TURN.fullmatch(pieces[-1]) is not None
    call = _BARE_CALL.search(turn.sampled)
    if kind is ActionKind.ANSWER or action or call is None:
        return False
    _, end = json.JSONDecoder().raw_decode(turn.sampled, call.start())  # the environment has too
    return _END_OF_TURN.fullmatch(turn.sampled, end) is not None

"""An episode as a reader sees it: blocks of tokens by origin, turn by turn.

Report and viewer hand an episode over and get frozen views back for ``templates/episode.html``.
Tokens are shown one by one, decoded one by one; without a decoder the turns' texts stand in.
What passages hold is untrusted, and leaves here as it came: ``pages`` makes it harmless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from forage.types import SEARCH_TOOL, ActionKind, Episode, Origin, Segment, ToolCall, Turn

Decode = Callable[[int], str]

_UNLIKELY = math.log(0.5)
_MAX_ARGUMENTS_CHARS = 200


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token: ``info`` is "id", or "id logprob version" of a sampled one, for the tooltip."""

    text: str
    info: str
    style: str


@dataclass(frozen=True, slots=True)
class BlockView:
    """A run of tokens of one origin under a heading; ``text`` stands in for missing tokens."""

    origin: str
    heading: str
    detail: str
    tokens: tuple[TokenView, ...]
    text: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """An episode and how it ended; ``verdict`` is right, wrong or unscored."""

    label: str
    status: str
    answer: str | None
    verdict: Literal["right", "wrong", "unscored"]
    reward: float | None
    parts: tuple[tuple[str, float], ...]
    num_searches: int
    num_sampled_tokens: int
    seconds: float
    versions: str
    blocks: tuple[BlockView, ...]


@dataclass(frozen=True, slots=True)
class QuestionView:
    """A question, its way to the answer, and the episodes that were played of it."""

    id: str
    text: str
    golden_answers: tuple[str, ...]
    hops: tuple[tuple[str, str, str], ...]
    num_hops: int | None
    episodes: tuple[EpisodeView, ...]


def view_question(labelled: Sequence[tuple[str, Episode]], decode: Decode | None) -> QuestionView:
    """Views of the episodes of one question, each under its label."""
    question = labelled[0][1].question
    return QuestionView(
        id=question.id,
        text=question.text,
        golden_answers=question.golden_answers,
        hops=tuple((hop.subject, hop.relation, hop.value) for hop in question.hops),
        num_hops=question.num_hops,
        episodes=tuple(view_episode(label, episode, decode) for label, episode in labelled),
    )


def view_episode(label: str, episode: Episode, decode: Decode | None) -> EpisodeView:
    """The view of one episode."""
    reward = episode.reward
    versions = sorted({v for s in episode.segments for v in s.versions_T})
    return EpisodeView(
        label=label,
        status=episode.status.value.replace("_", " "),
        answer=episode.answer,
        verdict="unscored" if reward is None else "right" if _em(episode) else "wrong",
        reward=None if reward is None else reward.value,
        parts=() if reward is None else tuple(sorted(reward.parts.items())),
        num_searches=episode.num_searches,
        num_sampled_tokens=episode.num_sampled_tokens,
        seconds=episode.seconds,
        versions=_range_text(versions),
        blocks=_token_blocks(episode, decode) if decode else _text_blocks(episode),
    )


def _em(episode: Episode) -> float:
    assert episode.reward is not None, "only a scored episode is right or wrong"
    return episode.reward.parts.get("em", episode.reward.value)


def _token_blocks(episode: Episode, decode: Decode) -> tuple[BlockView, ...]:
    """One block a segment. The policy's segment opens the next turn; an observation closes it."""
    blocks: list[BlockView] = []
    turns = iter(enumerate(episode.turns, start=1))
    number, turn = 0, None
    for segment in episode.segments:
        if segment.origin.is_policys:
            number, turn = next(turns, (number + 1, None))
        heading, detail = _heading(segment.origin, number, turn)
        count = len(segment.token_ids_T)
        blocks.append(
            BlockView(
                origin=segment.origin.value,
                heading=heading,
                detail=" · ".join(part for part in (detail, _count_text(count)) if part),
                tokens=_tokens(segment, decode),
                text="",
                is_open=segment.origin is not Origin.PROMPT,
            )
        )
    return tuple(blocks)


def _text_blocks(episode: Episode) -> tuple[BlockView, ...]:
    """Two blocks a turn, from the turns' texts; the prompt's text is not known."""
    blocks: list[BlockView] = []
    for number, turn in enumerate(episode.turns, start=1):
        for origin, text in (
            (Origin.SAMPLED, turn.sampled),
            (Origin.OBSERVATION, turn.observation),
        ):
            if text:
                heading, detail = _heading(origin, number, turn)
                blocks.append(BlockView(origin.value, heading, detail, (), text, True))
    return tuple(blocks)


def _heading(origin: Origin, number: int, turn: Turn | None) -> tuple[str, str]:
    if origin is Origin.PROMPT:
        return "Prompt", ""
    if turn is None:
        return f"Turn {number}, {origin.value}", ""
    if origin.is_policys:
        verb = {
            ActionKind.SEARCH: "search",
            ActionKind.CALL: turn.calls[0].tool if turn.calls else "call",
            ActionKind.ANSWER: "answer",
            ActionKind.INVALID: "no valid action",
        }[turn.kind]
        known = "known by its text alone" if origin is Origin.TRANSCRIBED else ""
        details = (known, _seconds_text(turn.generate_s))
        return f"Turn {number}: {verb}", " · ".join(part for part in details if part)
    if turn.kind is ActionKind.SEARCH and not turn.calls:
        return "Observation", "nothing found"
    return "Observation", " · ".join(_call_text(call) for call in turn.calls)


def _call_text(call: ToolCall) -> str:
    """What a call brought, and how long it took; other tools than search with their arguments."""
    is_search = call.tool == SEARCH_TOOL
    what = "" if is_search else f"{call.tool}({_arguments_text(call)})"
    if call.failure is not None:
        what = f"{'search' if is_search else what} failed: {call.failure.value.replace('_', ' ')}"
    elif is_search:
        shown = ", ".join(call.result_ids_K)
        what = f"passages {shown}" if shown else "nothing found"
    return " · ".join(part for part in (what, _seconds_text(call.seconds)) if part)


def _arguments_text(call: ToolCall) -> str:
    text = ", ".join(f"{name}: {value}" for name, value in call.arguments.items())
    return text if len(text) <= _MAX_ARGUMENTS_CHARS else f"{text[:_MAX_ARGUMENTS_CHARS]}…"


def _tokens(segment: Segment, decode: Decode) -> tuple[TokenView, ...]:
    is_sampled = segment.origin is Origin.SAMPLED
    views: list[TokenView] = []
    for index, token_id in enumerate(segment.token_ids_T):
        text = decode(token_id)
        info, style = str(token_id), "n" if "\n" in text else ""
        if is_sampled:
            logprob = segment.logprobs_T[index]
            info += f" {logprob:.4g} {segment.versions_T[index]}"
            style += " u" if logprob < _UNLIKELY else ""
        views.append(TokenView(text, info, style.strip()))
    return tuple(views)


def _range_text(versions: Sequence[int]) -> str:
    if not versions:
        return "–"
    return str(versions[0]) if len(versions) == 1 else f"{versions[0]}–{versions[-1]}"


def _count_text(num_tokens: int) -> str:
    return "1 token" if num_tokens == 1 else f"{num_tokens} tokens"


def _seconds_text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 1 else f"{seconds:.1f} s" if seconds else ""

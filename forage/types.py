"""What crosses folders: the nouns of a run, frozen, with their shapes, and three protocols.

Everything below is plain data. A room receives some of these and returns others; it never reaches
into another room's objects. Axis suffixes: ``_P`` questions, ``_G`` members of a group, ``_B``
rows, ``_T`` tokens, ``_K`` retrieved passages, ``_V`` vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice, pairwise
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a generated question's solution: look ``subject`` up, read ``value``."""

    subject: str
    relation: str
    value: str
    passage_id: str


@dataclass(frozen=True, slots=True)
class Question:
    """A text, its golden answers, where it comes from and its id.

    ``gold_passage_ids`` and ``hops`` are empty where the source does not give them.
    """

    id: str
    text: str
    golden_answers: tuple[str, ...]
    source: str
    gold_passage_ids: tuple[str, ...] = ()
    hops: tuple[Hop, ...] = ()

    @property
    def num_hops(self) -> int | None:
        """Searches that a perfect policy needs, where the source says so."""
        return len(self.hops) or len(self.gold_passage_ids) or None


@dataclass(frozen=True, slots=True)
class Passage:
    """One unit of the corpus.

    ``fields`` are what else its corpus line holds, by name: they travel with it and mean nothing
    here, so two passages that differ in them alone are equal.
    """

    id: str
    title: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def contents(self) -> str:
        """The passage as its corpus line wrote it; without such a line, as Forage writes one.

        That is the title in quotes, a line break and the text, or a single line of text alone.
        """
        own = self.fields.get("contents")
        if isinstance(own, str):
            return own
        is_plain = not self.title and "\n" not in self.text and self.text[:1] != '"'
        return self.text if is_plain else f'"{self.title}"\n{self.text}'


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that a search returned, with the backend's own score (higher is better)."""

    passage: Passage
    score: float


class FailureKind(StrEnum):
    """Why a tool or a judge gave nothing; the metric that counts it has this name.

    ``RAISED``: a tool of the user's raised an exception.
    """

    TIMEOUT = "timeout"
    REFUSED = "refused"
    MALFORMED = "malformed"
    SERVER_ERROR = "server_error"
    UNAVAILABLE = "unavailable"
    CLOSED = "closed"
    RAISED = "raised"


@dataclass(frozen=True, slots=True)
class SearchReply:
    """What a search gave back: hits, best first, or a typed failure (then ``hits_K`` is empty).

    ``is_switched_off``: nothing was searched, because the episode is played without a search.
    """

    hits_K: tuple[Hit, ...] = ()
    failure: FailureKind | None = None
    detail: str = ""
    is_switched_off: bool = False


@dataclass(frozen=True, slots=True)
class PageText:
    """A page that was opened, or the part of it that was asked for.

    ``text`` is part ``chunk`` (from 0) of ``num_chunks``; the whole page is part 0 of 1.
    """

    url: str
    text: str
    chunk: int = 0
    num_chunks: int = 1


@dataclass(frozen=True, slots=True)
class PageReply:
    """What opening a page gave back: the page, or a typed failure.

    Without either there is no page behind the address.
    """

    page: PageText | None = None
    failure: FailureKind | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TokenizerId:
    """Which tokenizer gave token ids their meaning: ``sha256`` of its vocabulary, and its name.

    The name is for people; two with the same hash are the same.
    """

    name: str
    sha256: str


class Origin(StrEnum):
    """Who wrote a segment of the transcript. Only ``SAMPLED`` tokens are ever trained.

    ``FOLDED`` begins the context anew in the middle of an episode: all that was in it, token for
    token, with a note in the place of each observation that was archived.
    ``TRANSCRIBED`` is the policy's text where a server gave nothing but text: the tokens are our
    tokenizer's reading of it, not those that were sampled, and their probabilities are unknown.
    """

    PROMPT = "prompt"
    SAMPLED = "sampled"
    OBSERVATION = "observation"
    FOLDED = "folded"
    TRANSCRIBED = "transcribed"

    @property
    def is_policys(self) -> bool:
        """Whether the policy wrote it, whatever is known of its tokens."""
        return self in (Origin.SAMPLED, Origin.TRANSCRIBED)


Alternatives = tuple[tuple[int, float], ...]
"""Tokens that were likely at a place, the likeliest first, with their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one origin.

    ``logprobs_T`` (natural logarithm, under the distribution that was sampled from) and
    ``versions_T`` (the policy version behind each token) are as long as ``token_ids_T`` in a
    sampled segment and empty in the others. ``alternatives_T`` is so too where it was recorded
    (``rollout.num_alternatives``), and else empty.
    """

    origin: Origin
    token_ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...] = ()
    versions_T: tuple[int, ...] = ()
    alternatives_T: tuple[Alternatives, ...] = ()

    def __post_init__(self) -> None:
        expected = len(self.token_ids_T) if self.origin is Origin.SAMPLED else 0
        assert len(self.logprobs_T) == expected, "a segment's log-probabilities do not fit it"
        assert len(self.versions_T) == expected, "a segment's policy versions do not fit it"
        assert len(self.alternatives_T) in (0, expected), "a segment's alternatives do not fit it"


class Tag(StrEnum):
    """The tags that the protocols know without being told; each tool adds one of its own.

    The only place where they are spelt: ``Tag.THINK.opening`` is ``<think>``.
    """

    THINK = "think"
    SEARCH = "search"
    INFORMATION = "information"
    ANSWER = "answer"
    TOOL_CALL = "tool_call"
    TOOL_RESPONSE = "tool_response"

    @property
    def opening(self) -> str:
        return f"<{self}>"

    @property
    def closing(self) -> str:
        return f"</{self}>"


TAGS_PROTOCOL = (Tag.THINK, Tag.SEARCH, Tag.INFORMATION, Tag.ANSWER)
"""The tags of the tags protocol, with search as its only tool."""


def tag_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Matches an opening or a closing tag of these names; the tag is its group 1."""
    return re.compile(rf"(</?(?:{'|'.join(names)})>)")


SEARCH_TOOL = "search"
"""The name of the tool that searches; ``Tag.SEARCH`` is its tag."""


class ActionKind(StrEnum):
    """What a turn of the policy amounted to; ``CALL`` is a call of any tool but search."""

    SEARCH = "search"
    CALL = "call"
    ANSWER = "answer"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One use of a tool that was run, with its arguments by name.

    ``result_ids_K`` name what was shown of the result (passages, an address); ``scores_K`` are the
    retriever's of those, empty where there are none; ``seconds`` are wall-clock. With a ``failure``
    nothing was shown but that the call failed.
    """

    tool: str
    arguments: Mapping[str, Any]
    result_ids_K: tuple[str, ...] = ()
    failure: FailureKind | None = None
    seconds: float = 0.0
    scores_K: tuple[float, ...] = ()


def search_call(
    queries: Sequence[str],
    result_ids_K: tuple[str, ...] = (),
    failure: FailureKind | None = None,
    seconds: float = 0.0,
) -> ToolCall:
    """A call of search as it is recorded, under both protocols."""
    arguments = {"query_list": list(queries)}
    return ToolCall(SEARCH_TOOL, arguments, result_ids_K, failure, seconds)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled until it acted or was cut, plus the observation that followed.

    ``argument`` is the query, the arguments of another tool, the answer, or why the action was
    invalid. ``observation`` is "" when the episode ended with this turn. ``calls`` are the tools
    that were run. Seconds are wall-clock. ``has_open_thought``: what was before the turn ends in an
    opening think tag, as some chat templates do.
    """

    sampled: str
    kind: ActionKind
    argument: str
    observation: str = ""
    calls: tuple[ToolCall, ...] = ()
    generate_s: float = 0.0
    has_open_thought: bool = False

    @property
    def written(self) -> str:
        """What was sampled, behind the think tag that was open already."""
        return f"{Tag.THINK.opening if self.has_open_thought else ''}{self.sampled}"

    @property
    def passage_ids_K(self) -> tuple[str, ...]:
        """The passages that the turn's search showed."""
        return tuple(i for call in self._searches for i in call.result_ids_K)

    @property
    def search_failure(self) -> FailureKind | None:
        """Why the turn's search failed, or None."""
        return next((call.failure for call in self._searches if call.failure), None)

    @property
    def search_s(self) -> float:
        """Seconds that the turn's search took."""
        return sum(call.seconds for call in self._searches)

    @property
    def failure(self) -> FailureKind | None:
        """Why a call of the turn failed, whatever its tool, or None."""
        return next((call.failure for call in self.calls if call.failure), None)

    @property
    def _searches(self) -> list[ToolCall]:
        return [call for call in self.calls if call.tool == SEARCH_TOOL]


class Status(StrEnum):
    """How an episode ended."""

    ANSWERED = "answered"
    OUT_OF_TURNS = "out_of_turns"
    OUT_OF_TOKENS = "out_of_tokens"
    SEARCH_FAILED = "search_failed"
    TOOL_FAILED = "tool_failed"
    ENGINE_FAILED = "engine_failed"

    @property
    def is_failed_call(self) -> bool:
        """Whether a search, or a call of another tool, failed for good on the way."""
        return self in (Status.SEARCH_FAILED, Status.TOOL_FAILED)


def status_after(turns: Sequence[Turn], status: Status) -> Status:
    """``status``, or that a call failed, which says more unless the engine failed too."""
    if status is Status.ENGINE_FAILED or not any(turn.failure for turn in turns):
        return status
    has_failed_search = any(turn.search_failure for turn in turns)
    return Status.SEARCH_FAILED if has_failed_search else Status.TOOL_FAILED


@dataclass(frozen=True, slots=True)
class Reward:
    """A scored outcome: the value that is maximised and the parts it was made of, by name.

    ``failure`` says why a judge gave no verdict: the value is then 0 and means nothing, and the
    episode is kept out of the loss.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: FailureKind | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One question played to its end. ``reward`` is None until it has been scored."""

    question: Question
    member: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    status: Status
    reward: Reward | None = None
    seconds: float = 0.0

    @property
    def answer(self) -> str | None:
        """The answer the policy gave, or None."""
        if self.turns and self.turns[-1].kind is ActionKind.ANSWER:
            return self.turns[-1].argument
        return None

    @property
    def num_searches(self) -> int:
        """Searches that were run (a query refused by the last, forced turn is not)."""
        return sum(turn.kind is ActionKind.SEARCH and bool(turn.observation) for turn in self.turns)

    @property
    def sampling_s(self) -> float:
        """Seconds that its turns were sampled for."""
        return sum(turn.generate_s for turn in self.turns)

    @property
    def searching_s(self) -> float:
        """Seconds that its searches and other tools took."""
        return sum(call.seconds for turn in self.turns for call in turn.calls)

    @property
    def token_ids_T(self) -> tuple[int, ...]:
        """Every token of the transcript, in order."""
        return tuple(i for segment in self.segments for i in segment.token_ids_T)

    @property
    def contexts(self) -> list[Episode]:
        """The sequences that it was sampled in: itself, or one from each place where it was folded.

        Each has the segments of its context, and the turns that were sampled in it.
        """
        folds = [i for i, each in enumerate(self.segments) if each.origin is Origin.FOLDED]
        if not folds:
            return [self]
        turns = iter(self.turns)
        parts = [self.segments[i:j] for i, j in pairwise([0, *folds, len(self.segments)])]
        return [
            replace(
                self,
                segments=part,
                turns=tuple(islice(turns, sum(each.origin.is_policys for each in part))),
            )
            for part in parts
        ]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy wrote; of a transcribed text, those of our own tokenizer."""
        return sum(len(s.token_ids_T) for s in self.segments if s.origin.is_policys)

    @property
    def is_trainable(self) -> bool:
        """Whether it is one sequence of which every token of the policy was sampled as recorded.

        Or several that were folded out of each other (``contexts``). False where a text was
        transcribed, and where several prompts follow one another: each of
        them began a context of its own, as the baselines do that ask the policy several things.
        """
        origins = [segment.origin for segment in self.segments]
        return origins.count(Origin.PROMPT) <= 1 and Origin.TRANSCRIBED not in origins


@dataclass(frozen=True, slots=True)
class Group:
    """The G episodes of one question that share a baseline.

    ``greedy`` is one more episode of it, played without noise where the baseline asks for it; it
    is never trained on.
    """

    question: Question
    episodes_G: tuple[Episode, ...]
    greedy: Episode | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled.

    ``stop`` ends a turn as soon as the sampled text contains one of these strings; ``stop_ids``
    as soon as one of these ids is sampled. The noise at a position depends on ``seed``,
    ``episode_key`` and the position alone. ``temperature`` 0 is greedy. ``on_token`` is called on
    the event loop with each token as it is sampled, where the engine is in this process.
    ``num_alternatives`` likely tokens are given beside each, by the engines that can.
    """

    max_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    episode_key: str
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    on_token: Callable[[int], None] | None = field(default=None, compare=False)
    num_alternatives: int = 0


class FinishReason(StrEnum):
    """Why a turn's sampling ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Completion:
    """One turn as sampled: every token that the engine chose, the stopping one included.

    ``is_transcribed``: only the text was known, the tokens are read off it, and ``logprobs_T`` and
    ``versions_T`` are empty.
    """

    token_ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    versions_T: tuple[int, ...]
    finish_reason: FinishReason
    is_transcribed: bool = False
    alternatives_T: tuple[Alternatives, ...] = ()


class EngineError(RuntimeError):
    """The engine could not sample a turn; the episode ends as ``ENGINE_FAILED``."""


class ContextOverflow(EngineError):
    """The model's context holds no further turn; the episode ends as ``OUT_OF_TOKENS``."""


class Generate(Protocol):
    """What the environment needs of an engine."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one turn after ``token_ids``; raises ``EngineError``."""
        ...

    def release(self, episode_key: str) -> None:
        """The episode is over: whatever was kept for its next turn may go."""
        ...


class Retriever(Protocol):
    """What the environment needs of a retriever. Failures are replies, never exceptions."""

    async def search(self, query: str) -> SearchReply: ...


@runtime_checkable
class PageOpener(Protocol):
    """What a tool that reads pages needs. Failures are replies, never exceptions."""

    async def open_page(
        self, url: str, chunk: int = 0, max_chars: int | None = None
    ) -> PageReply: ...


class Score(Protocol):
    """What the scheduler needs of the rewards; a judge that fails is in the reward it gives."""

    async def __call__(self, episode: Episode) -> Reward: ...

"""The state of one question played by a baseline: its prompts, searches and turns.

The environment's episode is one conversation; a baseline may ask the policy several things, each in
a separate context: a prompt and what follows it, exactly as the engine sees it. All contexts end
up in the episode's segments, one after another, and the turns record what happened in order. A
search that a method makes for the policy is a turn without sampled text. The methods are in this
folder; the rewards, which read what the policy wrote, score them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from forage.config.environment_config import EnvironmentConfig
from forage.environment.actions import ANSWER_CLOSE, ANSWER_OPEN, first_block
from forage.environment.codec import Codec
from forage.environment.episode import EpisodeSetting
from forage.environment.observation import (
    SEARCH_FAILED,
    Frame,
    Observation,
    build_observation,
    fixed_observation,
)
from forage.environment.prompt import Filling, fill
from forage.environment.transcript import Transcript
from forage.rollout.play.player import Job
from forage.types import (
    ActionKind,
    ContextOverflow,
    Episode,
    FailureKind,
    FinishReason,
    Generate,
    Hit,
    Origin,
    Retriever,
    SearchReply,
    Segment,
    Status,
    Turn,
    search_call,
    status_after,
)

# In our prompts nothing frames the passages.
_BARE = Frame((), (), ())


def read_template(name: str) -> str:
    folder = resources.files("forage.evaluation.methods") / "prompts"
    return (folder / f"{name}.txt").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Written:
    """What the policy wrote in one turn; ``content`` is the text without the end-of-turn token."""

    text: str
    content: str
    finish_reason: FinishReason
    seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: hits or a typed failure, and the seconds it took."""

    query: str
    hits_K: tuple[Hit, ...]
    failure: FailureKind | None
    seconds: float

    def turn(self, sampled: str, observation: Observation, generate_s: float = 0.0) -> Turn:
        """The turn for this search, with what was shown of it."""
        return Turn(
            sampled,
            ActionKind.SEARCH,
            self.query,
            observation=observation.text,
            calls=(search_call([self.query], observation.passage_ids, self.failure, self.seconds),),
            generate_s=generate_s,
        )


class Context:
    """A prompt and what follows it, as the engine sees it; created by ``Asking.open``."""

    def __init__(self, asking: Asking, key: str, prompt_ids: Sequence[int]) -> None:
        self._asking = asking
        self._key = key
        self.transcript = Transcript(prompt_ids)

    async def write(self, stop: tuple[str, ...], max_tokens: int | None = None) -> Written:
        """Samples one turn; raises ``EngineError``, or ``ContextOverflow`` if none fits."""
        asking = self._asking
        environment, codec = asking.environment, asking.codec
        wanted = environment.max_turn_tokens
        wanted = min(wanted, max_tokens) if max_tokens is not None else wanted
        room = min(wanted, environment.max_tokens - len(self.transcript))
        if room < 1:
            raise ContextOverflow(f"the prompt leaves no room in {environment.max_tokens} tokens")
        sampling = asking.setting.sampling(room, stop, codec.eos_ids, self._key)
        seconds_left = asking.seconds_left()
        if seconds_left <= 0:
            raise TimeoutError("the episode's deadline passed")
        started = time.monotonic()
        async with asyncio.timeout(seconds_left):
            completion = await asking.engine.generate(self.transcript.token_ids, sampling)
        self.transcript.append_sampled(completion)
        seconds = time.monotonic() - started
        ids = completion.token_ids_T
        content = codec.decode(ids[:-1] if ids and ids[-1] in codec.eos_ids else ids)
        return Written(codec.decode(ids), content, completion.finish_reason, seconds)

    def read(self, observation: Observation) -> None:
        """Appends an observation for the policy; raises ``ContextOverflow`` if there is no room."""
        left = self._asking.environment.max_tokens - len(self.transcript)
        if len(observation.token_ids) >= left:
            raise ContextOverflow("the search results do not fit")
        self.transcript.append_observation(observation.token_ids)

    def close(self) -> None:
        self._asking.engine.release(self._key)


class Asking:
    """The state of one question; a method drives it, and ``episode`` returns the result."""

    def __init__(
        self,
        environment: EnvironmentConfig,
        codec: Codec,
        setting: EpisodeSetting,
        job: Job,
        engine: Generate,
        search: Retriever,
    ) -> None:
        self.environment, self.codec, self.setting = environment, codec, setting
        self.job = job
        self.engine = engine
        self.turns: list[Turn] = []
        self._search = search
        self._contexts: list[Context] = []
        self._num_silent_turns = 0
        self._started = time.monotonic()

    def open(self, prompt_ids: Sequence[int]) -> Context:
        """A context that begins with this prompt, with its own noise."""
        key = f"{self.job.key}/context{len(self._contexts)}"
        context = Context(self, key, prompt_ids)
        self._contexts.append(context)
        return context

    def prompt(self, template: str, fillings: Mapping[str, Filling]) -> list[int]:
        return fill(template, fillings, self.codec)

    def room_after(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens can be added to a prompt so that a turn still fits after it."""
        longest = self.environment.max_tokens - self.environment.max_turn_tokens
        return max(longest - len(prompt_ids), 0)

    def show(self, found: Found, max_tokens: int) -> Observation:
        """The passages as a prompt shows them, within an observation's budget."""
        budget = min(max_tokens, self.environment.max_observation_tokens)
        if found.failure is not None:
            return fixed_observation(SEARCH_FAILED, self.codec, budget, _BARE)
        return self.gather(found.hits_K, budget)

    def gather(self, hits: Sequence[Hit], max_tokens: int) -> Observation:
        """As many of the first passages as fit into ``max_tokens``."""
        return build_observation(hits, self.codec, max_tokens, _BARE)

    async def search(self, query: str) -> Found:
        """Queries the retriever; an error or a timeout is a typed failure."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.seconds_left()):
                reply = await self._search.search(query)
        except TimeoutError:
            reply = SearchReply(failure=FailureKind.TIMEOUT, detail="the episode's deadline passed")
        return Found(query, reply.hits_K, reply.failure, time.monotonic() - started)

    def note_own_search(self, found: Found, shown: Observation) -> None:
        """Records a search that the method made for the policy, before all contexts."""
        assert not self._contexts, "a method's own search must come before the policy's first turn"
        self.turns.append(found.turn("", shown))
        self._num_silent_turns += 1

    async def answer(self, context: Context) -> Status:
        """Lets the policy give its answer, in the last turn of every method."""
        written = await context.write((ANSWER_CLOSE,))
        context.close()
        return self.take_answer(written)

    def take_answer(self, written: Written) -> Status:
        """Records the last turn, with its answer if there is one; returns how the episode ended."""
        block = first_block(written.text, ANSWER_OPEN, ANSWER_CLOSE)
        if block is not None:
            kind, argument, status = ActionKind.ANSWER, block[1].strip(), Status.ANSWERED
        else:
            kind, argument = ActionKind.INVALID, f"The turn holds no {ANSWER_OPEN}."
            is_cut = written.finish_reason is FinishReason.LENGTH
            status = Status.OUT_OF_TOKENS if is_cut else Status.OUT_OF_TURNS
        self.turns.append(Turn(written.text, kind, argument, generate_s=written.seconds))
        return status

    def seconds_left(self) -> float:
        return self.setting.deadline_s - (time.monotonic() - self._started)

    @property
    def was_late_for_a_search(self) -> bool:
        """Whether a failed search used up the episode's time, which is not the engine's failure."""
        has_failed = bool(self.turns) and self.turns[-1].search_failure is not None
        return has_failed and self.seconds_left() <= 0

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def episode(self, status: Status) -> Episode:
        """The finished episode; a turn without sampled text has an empty segment."""
        segments = [Segment(Origin.SAMPLED, ())] * self._num_silent_turns
        for context in self._contexts:
            segments += context.transcript.segments
        return Episode(
            question=self.job.question,
            member=self.job.member,
            segments=tuple(segments),
            turns=tuple(self.turns),
            status=status_after(self.turns, status),
            seconds=time.monotonic() - self._started,
        )

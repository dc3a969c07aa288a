"""One question, played to its end: sample, act, observe, until an answer or a budget ends it.

A turn is sampled up to what ends it; a search is answered with passages, anything else that is no
answer with a fixed message; after ``max_turns`` turns one last turn may be sampled in which a
search is not run. How actions and replies are written is the protocol's (``protocol.py``). The
engine and the retriever are passed in. Nothing here scores, batches or trains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from forage.config.environment_config import EnvironmentConfig
from forage.environment import actions
from forage.environment.codec import Codec
from forage.environment.observation import (
    Observation,
    build_observation,
    empty_observation,
    failed_observation,
    message_observation,
    switched_off_observation,
)
from forage.environment.protocol import make_protocol
from forage.environment.transcript import Transcript
from forage.types import (
    ActionKind,
    ContextOverflow,
    EngineError,
    Episode,
    FailureKind,
    Generate,
    Hit,
    Question,
    Retriever,
    Sampling,
    SearchReply,
    Status,
    Turn,
    search_call,
    status_after,
)


@dataclass(frozen=True, slots=True)
class EpisodeSetting:
    """What one episode needs to know besides its question."""

    member: int
    key: str
    seed: int
    temperature: float
    top_p: float
    deadline_s: float


class Environment:
    """The rules, and the tokenizer they are written with."""

    def __init__(self, config: EnvironmentConfig, codec: Codec) -> None:
        """Raises ``UserError`` for a budget or a chat template that cannot work."""
        self.config = config
        self.codec = codec
        self.protocol = make_protocol(config.protocol, codec)
        for frame in self.protocol.frames():
            empty_observation(codec, config.max_observation_tokens, frame)

    async def play(
        self,
        question: Question,
        prompt_ids: Sequence[int],
        setting: EpisodeSetting,
        engine: Generate,
        search: Retriever,
    ) -> Episode:
        """Play ``question`` once. Failures of the engine or of searches end up in the status."""
        player = _Player(self, question, Transcript(prompt_ids), setting, engine, search)
        try:
            return await player.play()
        finally:
            engine.release(setting.key)


class _Player:
    """The state of one episode in flight."""

    def __init__(
        self,
        environment: Environment,
        question: Question,
        transcript: Transcript,
        setting: EpisodeSetting,
        engine: Generate,
        search: Retriever,
    ) -> None:
        self._config = environment.config
        self._codec = environment.codec
        self._protocol = environment.protocol
        self._question = question
        self._transcript = transcript
        self._setting = setting
        self._engine = engine
        self._search = search
        self._turns: list[Turn] = []
        self._started = time.monotonic()

    async def play(self) -> Episode:
        status = await self._play_turns()
        return Episode(
            question=self._question,
            member=self._setting.member,
            segments=self._transcript.segments,
            turns=tuple(self._turns),
            status=status_after(self._turns, status),
            seconds=time.monotonic() - self._started,
        )

    async def _play_turns(self) -> Status:
        config = self._config
        for index in range(config.max_turns + config.has_final_turn):
            max_turn_tokens = min(config.max_turn_tokens, self._tokens_left())
            if max_turn_tokens < 1:
                return Status.OUT_OF_TOKENS
            try:
                turn, action = await self._sample_turn(max_turn_tokens)
            except ContextOverflow:
                return Status.OUT_OF_TOKENS
            except (EngineError, TimeoutError):
                return Status.ENGINE_FAILED
            if turn.kind is ActionKind.ANSWER:
                self._turns.append(turn)
                return Status.ANSWERED
            is_last = index == config.max_turns + config.has_final_turn - 1
            if is_last:
                self._turns.append(turn)
                return Status.OUT_OF_TURNS if self._tokens_left() else Status.OUT_OF_TOKENS
            turn, observation = await self._observe(turn, action)
            if len(observation.token_ids) >= self._tokens_left():
                # What the policy could not answer after is not worth showing.
                self._turns.append(_unseen(turn))
                return Status.OUT_OF_TOKENS
            self._turns.append(turn)
            self._transcript.append_observation(observation.token_ids)
            if turn.search_failure and self._seconds_left() <= 0:
                # Not the engine's fault, which would be given no time at all.
                return Status.SEARCH_FAILED
        raise AssertionError("the last turn ends the episode")

    async def _sample_turn(self, max_tokens: int) -> tuple[Turn, actions.Action]:
        setting = self._setting
        sampling = Sampling(
            max_tokens=max_tokens,
            stop=self._protocol.stop,
            stop_ids=self._codec.eos_ids,
            episode_key=setting.key,
            seed=setting.seed,
            temperature=setting.temperature,
            top_p=setting.top_p,
        )
        started = time.monotonic()
        async with asyncio.timeout(self._seconds_left()):
            completion = await self._engine.generate(self._transcript.token_ids, sampling)
        self._transcript.append_sampled(completion)
        sampled = self._codec.decode(completion.token_ids_T)
        seconds = time.monotonic() - started
        action = self._protocol.parse(sampled)
        match action:
            case actions.Search():
                kind, argument = ActionKind.SEARCH, "\n".join(action.queries)
            case actions.Answer(text):
                kind, argument = ActionKind.ANSWER, text
            case actions.Invalid(reason):
                kind, argument = ActionKind.INVALID, reason
        return Turn(sampled, kind, argument, generate_s=seconds), action

    async def _observe(self, turn: Turn, action: actions.Action) -> tuple[Turn, Observation]:
        """The observation that ``turn`` earns, and the turn with it written in."""
        codec, budget = self._codec, self._config.max_observation_tokens
        last_id = self._transcript.last_id
        if not isinstance(action, actions.Search):
            frame = self._protocol.message_frame(last_id)
            message = self._protocol.invalid_message
            message = message if frame is None else message.strip()
            observation = message_observation(message, codec, budget, frame)
            return replace(turn, observation=observation.text), observation
        frame = self._protocol.results_frame(last_id)
        started = time.monotonic()
        reply = _merge(await asyncio.gather(*map(self._reply_to, action.queries)))
        if reply.failure is not None:
            observation = failed_observation(codec, budget, frame)
        elif reply.is_switched_off:
            observation = switched_off_observation(codec, budget, frame)
        else:
            observation = build_observation(reply.hits_K, codec, budget, frame)
        turn = replace(
            turn,
            observation=observation.text,
            calls=(
                search_call(
                    action.queries,
                    observation.passage_ids,
                    reply.failure,
                    time.monotonic() - started,
                ),
            ),
        )
        return turn, observation

    async def _reply_to(self, query: str) -> SearchReply:
        try:
            async with asyncio.timeout(self._seconds_left()):
                return await self._search.search(query)
        except TimeoutError:
            return SearchReply(failure=FailureKind.TIMEOUT, detail="the episode's deadline passed")

    def _tokens_left(self) -> int:
        return self._config.max_tokens - len(self._transcript)

    def _seconds_left(self) -> float:
        return self._setting.deadline_s - (time.monotonic() - self._started)


def _unseen(turn: Turn) -> Turn:
    """The turn, as it is recorded where its observation was not shown."""
    calls = tuple(replace(call, result_ids_K=()) for call in turn.calls)
    return replace(turn, observation="", calls=calls)


def _merge(replies: Sequence[SearchReply]) -> SearchReply:
    """One reply to several queries: their hits in turn, each passage once; a failure stays one."""
    if len(replies) == 1:
        return replies[0]
    unanswered = next((r for r in replies if r.failure is not None or r.is_switched_off), None)
    if unanswered is not None:
        return unanswered
    hits: dict[str, Hit] = {}
    for row in zip_longest(*(reply.hits_K for reply in replies)):
        for hit in row:
            if hit is not None:
                hits.setdefault(hit.passage.id, hit)
    return SearchReply(tuple(hits.values()))

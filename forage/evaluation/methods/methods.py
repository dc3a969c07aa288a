"""Which way of answering an evaluation takes: the environment's own, or one of the baselines.

``make_player`` gives the evaluation something that plays jobs; nothing else there knows of the
baselines. Each of them is in a file of its own, with its paper and what differs from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from forage.config.evaluation_config import Method
from forage.config.run_config import RunConfig
from forage.environment.codec import Codec
from forage.environment.prompt import asked, check_length, fill
from forage.errors import UserError
from forage.evaluation.methods import ircot, search_o1, single_prompt
from forage.evaluation.methods.asking import Asking
from forage.evaluation.methods.rejection_sampling import RejectionSampler, num_candidates
from forage.rollout.play.player import Job, Player
from forage.types import (
    ContextOverflow,
    EngineError,
    Episode,
    Generate,
    Question,
    Retriever,
    Score,
    Status,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ask = Callable[[Asking], Awaitable[Status]]
"""A baseline: drives one question to its end and says how it ended; raises ``EngineError``."""


PROMPTS: dict[Method, tuple[str, ...]] = {
    "direct": (single_prompt.DIRECT,),
    "chain_of_thought": (single_prompt.CHAIN_OF_THOUGHT,),
    "rag": (single_prompt.RAG,),
    "ircot": (ircot.CHAIN_TEMPLATE, ircot.READER_TEMPLATE),
    "search_o1": (search_o1.TEMPLATE, search_o1.READER_TEMPLATE),
}
"""What each baseline asks with, the first prompt first. The others ask as the environment does."""

_ASKS: dict[Method, Ask] = {
    "direct": partial(single_prompt.ask_once, template=single_prompt.DIRECT),
    "chain_of_thought": partial(single_prompt.ask_once, template=single_prompt.CHAIN_OF_THOUGHT),
    "rag": single_prompt.ask_with_passages,
    "ircot": ircot.interleave,
    "search_o1": search_o1.reason_with_searches,
}


def make_player(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, score: Score | None
) -> AnyPlayer:
    """The player of ``evaluation.method``; raises ``UserError``.

    ``score`` is what rejection sampling chooses by: None where questions have no golden answers.
    """
    method = config.evaluation.method
    if method in PROMPTS:
        # Each chain holds its place in the engine while its passages are read in another.
        has_two_contexts = method == "search_o1" and config.model.endpoint is None
        room = _half_of_the_slots(config.rollout.engine.num_slots) if has_two_contexts else None
        return BaselinePlayer(config, tokenizer, _ASKS[method], PROMPTS[method][0], room)
    player = Player(config.environment, config.rollout, tokenizer, config.seed)
    if method == "search":
        return player
    if score is None:
        raise UserError(
            "evaluation.method: rejection_sampling chooses by the golden answers, which a question "
            "that is asked here has not; use another method"
        )
    return RejectionSampler(player, score, num_candidates(config))


class BaselinePlayer:
    """Turns a job into an episode by a baseline, as ``Player`` does by the environment."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerFast,
        ask: Ask,
        template: str,
        room: asyncio.Semaphore | None = None,
    ) -> None:
        """``template`` is the first prompt; ``room`` bounds how many questions are under way."""
        self.codec = Codec(tokenizer)
        self._config = config
        self._ask = ask
        self._template = template
        self._room = room

    def check_prompts(self, questions: Iterable[Question]) -> None:
        """Encode every first prompt; raises ``UserError`` for one that leaves too little room.

        Where passages belong into it, those of a search and a turn must fit beside it.
        """
        empty = {"passages": (), "reasoning": ""}
        environment = self._config.environment
        longest = environment.max_tokens - 1
        if "{passages}" in self._template:
            reserved = environment.max_turn_tokens + environment.max_observation_tokens
            longest = environment.max_tokens - reserved
        for question in questions:
            fillings = {"question": asked(question.text), **empty}
            ids = fill(self._template, fillings, self.codec)
            check_length(ids, question, longest)

    async def play(
        self, job: Job, engine: Generate, search: Retriever, temperature: float | None = None
    ) -> Episode:
        """Play one job; failures of the engine or of searches end up in the status."""
        config = self._config
        episode = job.setting(config.rollout, config.seed, temperature)
        asking = Asking(config.environment, self.codec, episode, job, engine, search)
        async with AsyncExitStack() as stack:
            if self._room is not None:
                await stack.enter_async_context(self._room)
            try:
                status = await self._ask(asking)
            except ContextOverflow:
                status = Status.OUT_OF_TOKENS
            except (EngineError, TimeoutError):
                was_late = asking.was_late_for_a_search
                status = Status.SEARCH_FAILED if was_late else Status.ENGINE_FAILED
            finally:
                asking.close()
        return asking.episode(status)


AnyPlayer = Player | RejectionSampler | BaselinePlayer
"""What turns a job into an episode, and says with ``codec`` how its transcripts are written."""


def _half_of_the_slots(num_slots: int) -> asyncio.Semaphore:
    """Room for as many questions as the engine has two places for; raises ``UserError``."""
    if num_slots < 2:
        raise UserError(
            "evaluation.method: search_o1 asks in two contexts at once, and "
            f"rollout.engine.num_slots is {num_slots}: raise it to 2 or more"
        )
    return asyncio.Semaphore(num_slots // 2)

"""Compares what a server computes with the trainer: log-probabilities of a short text.

``weight_update.py`` asks for it after each update, before the server's turns count. A server that
took new weights and says so may still sample with others: vLLM keeps copies of some in a layout of
its own, and other kernels or settings may compute another function.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerFast

from forage.errors import UserError
from forage.rollout.engines.servers.engine_server import EngineServer, ServerFailed

TEXT = (
    "The Tiber rises in the Apennines and flows 405 kilometres to the Tyrrhenian Sea. Rome was "
    "founded on its eastern bank, where an island makes the river easy to cross. Which other "
    "cities lie on it? I will search for that first, and then answer."
)
MAX_TOKENS = 64

TextLogprobs = Callable[[Sequence[int]], Sequence[float]]
"""The trainer's log-probability of each token of a text but the first; it may block."""


def tokens_of_text(tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> list[int]:
    """The text as tokens, cut so that a context of ``max_tokens`` holds it and one more."""
    return list(tokenizer(TEXT)["input_ids"])[: min(MAX_TOKENS, max_tokens - 1)]


class WeightCheck:
    """The text, the trainer's log-probabilities of it, and how far a server's may be from them."""

    def __init__(self, token_ids: Sequence[int], ask: TextLogprobs, bound: float) -> None:
        self._token_ids = token_ids
        self._ask = ask
        self._bound = bound
        self._expected: Sequence[float] = ()
        self._numbers = itertools.count()
        self.wrong: set[EngineServer] = set()
        """Servers that differed when they were last compared."""

    async def prepare(self) -> None:
        """Compute the trainer's values, while its weights are those that servers get next.

        Raises ``UserError`` where they are not finite, and what the trainer raises.
        """
        self._expected = await asyncio.to_thread(self._ask, self._token_ids)
        if not all(map(math.isfinite, self._expected)):
            raise UserError(
                "the policy gives log-probabilities that are not finite for a plain text: its "
                "weights are damaged. Go back to an earlier checkpoint, or check model.path"
            )

    async def __call__(self, server: EngineServer) -> None:
        """Raise ``ServerFailed`` where the server differs from the trainer, or does not answer."""
        # A salt for each time: no keys and values of other weights are read.
        salt = f"check.{next(self._numbers)}"
        found = await server.logprobs_of(self._token_ids, salt)
        gaps = [abs(mine - theirs) for mine, theirs in zip(self._expected, found, strict=True)]
        mean = math.fsum(gaps) / len(gaps)
        self.wrong.discard(server)
        if not mean <= self._bound:  # nor where it is NaN
            self.wrong.add(server)
            why = (
                f"its log-probabilities of a known text differ from the trainer's by {mean:.2g} "
                f"per token (at most {max(gaps):.2g}), beyond the bound of {self._bound:g}"
            )
            raise ServerFailed.for_good(server.url, "compute what the trainer computes", why)

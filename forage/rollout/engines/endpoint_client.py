"""A model endpoint as the engines see it: what was asked for, or an exception that ends the turn.

``forage.remote.openai_client`` sends, retries and counts; this file reads the key that the recipe
names and says what its failures mean for an episode, and for a user who starts a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from forage.config.model_config import EndpointConfig
from forage.errors import UserError
from forage.remote.openai_client import OpenAIClient, RequestCounts, is_overflow
from forage.remote.openai_replies import ModelList
from forage.remote.request import RemoteFailure
from forage.remote.retry import Patience
from forage.remote.secret import read_key
from forage.types import ContextOverflow, EngineError, FailureKind

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0
_MAX_FAILURES_IN_A_ROW = 8
# Failures of a server, after all retries; the others are about what was asked.
_ITS_OWN = {
    FailureKind.UNAVAILABLE,
    FailureKind.TIMEOUT,
    FailureKind.SERVER_ERROR,
    FailureKind.MALFORMED,
}
# Refusals whatever is asked: of the key, for want of money, of the model, of so many requests.
_SHUTS_OUT = {401, 402, 403, 404, 429}

T = TypeVar("T")


class EndpointFailure(EngineError):
    """The endpoint gave nothing: ``kind`` as the metrics count it, ``status`` as HTTP has it."""

    def __init__(self, kind: FailureKind, detail: str, status: int = 0) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.status = status


class EndpointClient:
    """The server of ``model.endpoint``; use it on one event loop, and close it."""

    def __init__(self, settings: EndpointConfig, backoff_s: float = 1.0) -> None:
        """``backoff_s``: the wait before the first retry, doubled with each one after it."""
        key = read_key("model.endpoint", settings.key_file, settings.key_variable)
        limits = (settings.timeout_s, settings.max_retries)
        patience = Patience(*limits, backoff_s, _MAX_BACKOFF_S, is_paid=True)
        self.settings = settings
        self._num_in_a_row = 0
        """Requests that the server failed since the last one that it answered."""
        self._has_answered = False
        self._has_key = key is not None
        self._client = OpenAIClient(
            *("model endpoint", settings.base_url, key, patience), settings.max_concurrent_requests
        )

    @property
    def counts(self) -> RequestCounts:
        """A snapshot of the counters; each failure ended an episode."""
        return self._client.counts

    async def ask(self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Post ``body`` and give back what ``read`` makes of the reply.

        Raises ``ContextOverflow`` where prompt and completion exceed the model's context,
        ``EndpointFailure`` where retries are used up or would not help, and ``UserError`` where
        the server has answered before and does so no more.
        """
        outcome = await self._client.ask(path, body, read)
        if not isinstance(outcome, RemoteFailure):
            self._num_in_a_row, self._has_answered = 0, True
            return outcome
        if is_overflow(outcome):
            raise ContextOverflow(outcome.detail)
        failure = EndpointFailure(outcome.kind, outcome.detail, outcome.status)
        if self._has_answered and (outcome.kind in _ITS_OWN or outcome.status in _SHUTS_OUT):
            await self._raise_if_gone(failure)
        raise failure

    async def _raise_if_gone(self, failure: EndpointFailure) -> None:
        """Raise ``UserError`` where nobody answers any more, or nothing but failures comes.

        Were they failures of episodes alone, an evaluation would end with what looks like a policy
        that knows nothing.
        """
        self._num_in_a_row += 1
        is_there = failure.kind is not FailureKind.UNAVAILABLE or await self._client.is_there()
        if is_there and self._num_in_a_row < _MAX_FAILURES_IN_A_ROW:
            return
        remedy = "Look into its log and start it again"
        if failure.status in _SHUTS_OUT:
            remedy = "Look at the key, its quota, and model.endpoint.served_model"
        raise UserError(
            f"the model endpoint at {self.settings.base_url} has stopped answering ({failure}). "
            f"{remedy}; the same command goes on with what is missing, and with --retry-failed "
            "also with what has failed"
        )

    async def list_models(self) -> ModelList | None:
        """What the server says it serves; None where it does not say."""
        return await self._client.list_models()

    async def explain(self, failure: EngineError) -> UserError:
        """The failure of a first request as an error of the user's, with the names it serves."""
        said = f"the model endpoint at {self.settings.base_url} does not answer: {failure}"
        status = failure.status if isinstance(failure, EndpointFailure) else 0
        models = await self.list_models()
        if models is not None and models.ids and self.settings.served_model not in models.ids:
            names = ", ".join(sorted(models.ids)[:8])
            said += (
                f". It serves {names}, and model.endpoint.served_model is "
                f"{self.settings.served_model}"
            )
        elif status in (401, 403) and not self._has_key:
            said += ". No key was sent: model.endpoint.key_variable or key_file names one"
        elif status == 404 and models is None:
            said += (
                ". model.endpoint.url is what the paths of the API hang under, and ends in /v1 at "
                "most servers"
            )
        return UserError(said)

    async def close(self) -> None:
        """End the session and say what was used."""
        await self._client.close()
        counts = self.counts
        logger.info(
            "model endpoint: %d requests (%d retries), %d prompt tokens (%d cached), %d completion "
            "tokens (%d of hidden reasoning), failures: %s",
            *(counts.requests, counts.retries, counts.usage.prompt_tokens),
            *(counts.usage.cached_tokens, counts.usage.completion_tokens),
            *(counts.usage.reasoning_tokens, counts.failures or "none"),
        )

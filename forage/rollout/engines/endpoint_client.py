"""The way to a model endpoint: its key, room for so many requests, retries with jitter, and counts.

An engine hands over a body and how to read the reply; it gets what was read, or an exception that
ends the episode. A server that asks for patience (429, Retry-After) is given it by all requests at
once. What is sent and what replies mean is the engines' (``completions_engine``, ``chat_engine``).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp

from forage.config.endpoint_config import EndpointConfig
from forage.errors import UserError
from forage.rollout.engines.endpoint_exchange import Refusal, exchange
from forage.rollout.engines.endpoint_key import read_endpoint_key
from forage.rollout.engines.endpoint_wire import BadReply, ModelList, Usage, read_models, read_usage
from forage.types import ContextOverflow, EngineError, FailureKind

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0

T = TypeVar("T")


class EndpointFailure(EngineError):
    """The endpoint gave nothing: ``kind`` as the metrics count it, ``status`` as HTTP has it."""

    def __init__(self, kind: FailureKind, detail: str, status: int = 0) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.status = status


@dataclass(frozen=True, slots=True)
class EndpointCounts:
    """What was asked of an endpoint; tokens as the server counts (and bills) them.

    ``failures`` by kind, an overflow of the context under ``context_overflow``: each ended an
    episode.
    """

    requests: int = 0
    retries: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)


class EndpointClient:
    """One HTTP session to one server; use it on one event loop, and close it."""

    def __init__(self, settings: EndpointConfig, backoff_s: float = 1.0) -> None:
        """``backoff_s``: the wait before the first retry, doubled with each one after it."""
        self.settings = settings
        self._key = read_endpoint_key(settings)
        self._backoff_s = backoff_s
        self._jitter = random.Random()  # its own: a run's seeded generators stay untouched
        self._room = asyncio.Semaphore(settings.max_concurrent_requests)
        self._not_before = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._counts = EndpointCounts()
        self._failures: Counter[str] = Counter()

    @property
    def counts(self) -> EndpointCounts:
        """A snapshot of the counters."""
        return replace(self._counts, failures=dict(sorted(self._failures.items())))

    async def ask(self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Post ``body`` and give back what ``read`` makes of the reply.

        Raises ``ContextOverflow`` where prompt and completion exceed the model's context, and
        ``EndpointFailure`` where retries are used up or would not help.
        """
        tries = 0
        while True:
            outcome = await self._send("POST", path, body)
            if not isinstance(outcome, Refusal):
                self._count_usage(outcome)
                try:
                    return read(outcome)
                except BadReply as error:
                    outcome = Refusal(error.kind, str(error), error.may_pass)
            if not outcome.may_pass or tries == self.settings.max_retries:
                raise self._failure(outcome)
            await self._pause(tries, outcome)
            tries += 1
            self._counts = replace(self._counts, retries=self._counts.retries + 1)

    async def list_models(self) -> ModelList | None:
        """What the server says it serves; None where it does not say."""
        outcome = await self._send("GET", "/models", None)
        return None if isinstance(outcome, Refusal) else read_models(outcome)

    async def explain(self, failure: EngineError) -> UserError:
        """The failure of a first request as the user's to mend, with the names that are served."""
        said = f"the model endpoint at {self.settings.base_url} does not answer: {failure}"
        status = failure.status if isinstance(failure, EndpointFailure) else 0
        models = await self.list_models()
        if models is not None and models.ids and self.settings.served_model not in models.ids:
            names = ", ".join(sorted(models.ids)[:8])
            said += (
                f". It serves {names}, and model.endpoint.served_model is "
                f"{self.settings.served_model}"
            )
        elif status in (401, 403) and self._key is None:
            said += ". No key was sent: model.endpoint.key_variable or key_file names one"
        elif status == 404 and models is None:
            said += (
                ". model.endpoint.url is what the paths of the API hang under, and ends in /v1 at "
                "most servers"
            )
        return UserError(said)

    async def close(self) -> None:
        """End the session and say what was used."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        counts = self.counts
        logger.info(
            "model endpoint: %d requests (%d retries), %d prompt tokens (%d cached), %d completion "
            "tokens (%d of hidden reasoning), failures: %s",
            *(counts.requests, counts.retries, counts.usage.prompt_tokens),
            *(counts.usage.cached_tokens, counts.usage.completion_tokens),
            *(counts.usage.reasoning_tokens, counts.failures or "none"),
        )

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> dict[str, Any] | Refusal:
        async with self._room:
            loop = asyncio.get_running_loop()
            while (wait_s := self._not_before - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            self._counts = replace(self._counts, requests=self._counts.requests + 1)
            return await exchange(
                self._open_session(),
                method,
                f"{self.settings.base_url}{path}",
                body,
                self.settings.timeout_s,
                (self._key.get_secret_value(),) if self._key else (),
            )

    async def _pause(self, tries: int, refusal: Refusal) -> None:
        """Exponential back-off with jitter; what the server itself asks for holds for everybody."""
        pause_s = min(self._backoff_s * 2**tries, _MAX_BACKOFF_S) * self._jitter.uniform(0.5, 1.5)
        if refusal.retry_after_s:
            now = asyncio.get_running_loop().time()
            self._not_before = max(self._not_before, now + refusal.retry_after_s)
            logger.info("the model endpoint asks to wait %.3g s", refusal.retry_after_s)
        await asyncio.sleep(pause_s)

    def _failure(self, refusal: Refusal) -> EngineError:
        name = "context_overflow" if refusal.is_overflow else refusal.kind.value
        self._failures[name] += 1
        if self._failures[name] == 1:
            logger.warning("model endpoint: %s (%s)", refusal.detail, name)
        if refusal.is_overflow:
            return ContextOverflow(refusal.detail)
        return EndpointFailure(refusal.kind, refusal.detail, refusal.status)

    def _count_usage(self, document: dict[str, Any]) -> None:
        usage = self._counts.usage + read_usage(document)
        self._counts = replace(self._counts, usage=usage)

    def _open_session(self) -> aiohttp.ClientSession:
        """The one session, opened on the loop that first needs it."""
        if self._session is None:
            key = self._key
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.settings.max_concurrent_requests),
                headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else None,
            )
        return self._session

"""What servers that sample share over HTTP: their connections, their failures, a turn put together.

Each server's own routes and replies are in ``vllm_server.py`` and ``sglang_server.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from forage.remote.json_server import JsonServer
from forage.remote.openai_client import is_overflow
from forage.remote.request import RemoteFailure, first_wrong
from forage.rollout.engines.servers.engine_server import ServerFailed, TurnAborted
from forage.types import Completion, ContextOverflow, EngineError, FailureKind, FinishReason

HEALTH_S = 10.0
_KEEPALIVE_S = 2.0
_CONTROL_CONNECTIONS = 8
_MAX_LOGPROB = 1e-3
"""What rounding makes of a probability of 1, and more: log-probabilities are below it."""
_ENDS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VersionSpan(BaseModel):
    """Tokens [start, end) were sampled under this version of the weights."""

    version: int
    start: int
    end: int


class EngineHttp:
    """Connections to one server: some for turns, some for its control. All times in seconds."""

    def __init__(
        self, url: str, timeout_s: float, update_timeout_s: float, max_connections: int
    ) -> None:
        self.url = url
        self._timeout_s, self._update_timeout_s = timeout_s, update_timeout_s
        self._turns = JsonServer(url, max_connections, _KEEPALIVE_S)
        self._control = JsonServer(url, _CONTROL_CONNECTIONS)

    async def sample(
        self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Completion]
    ) -> Completion:
        """The turn that ``read`` makes of the reply; raises as ``EngineServer.sample`` does.

        ``read`` raises ``ValueError`` for what is no turn.
        """
        document = await self._turns.post(path, body, self._timeout_s)
        if isinstance(document, RemoteFailure):
            if is_overflow(document):
                raise ContextOverflow(document.detail)
            if document.kind is FailureKind.REFUSED and not document.may_pass:
                raise EngineError(f"{self.url} refuses the turn: {document.detail}")
            raise ServerFailed(self.url, "sample a turn", document)
        try:
            return read(document)
        except ValidationError as error:
            why = first_wrong(error)
        except ValueError as error:
            why = str(error)
        failure = RemoteFailure(FailureKind.MALFORMED, f"its reply is no turn: {why}")
        raise ServerFailed(self.url, "sample a turn", failure)

    async def logprobs_of(
        self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], list[float]]
    ) -> list[float]:
        """What ``read`` finds in the reply about a text; raises ``ServerFailed``."""
        doing = "compute log-probabilities"
        # It may have to wait for a place among the turns.
        document = self._or_raise(await self._control.post(path, body, self._timeout_s), doing)
        try:
            return read(document)
        except ValidationError as error:
            why = first_wrong(error)
        except ValueError as error:
            why = str(error)
        raise ServerFailed.for_good(self.url, doing, f"its reply has none of the text: {why}")

    async def abort(self, path: str, body: dict[str, Any]) -> None:
        """Tell the server that a turn is not wanted any more, whatever it says to that."""
        await self._control.post(path, body, HEALTH_S)

    async def is_alive(self, path: str = "/health") -> bool:
        return not isinstance(await self._control.get(path, HEALTH_S), RemoteFailure)

    async def get(self, path: str, doing: str) -> dict[str, Any]:
        """Raises ``ServerFailed``, which says what the server failed to do."""
        return self._or_raise(await self._control.get(path, self._update_timeout_s), doing)

    async def post(self, path: str, body: dict[str, Any], doing: str) -> dict[str, Any]:
        """Raises ``ServerFailed``, which says what the server failed to do."""
        return self._or_raise(await self._control.post(path, body, self._update_timeout_s), doing)

    async def tell(self, path: str, body: dict[str, Any], doing: str) -> None:
        """As ``post``, where the reply is no object: only its status is read."""
        failure = await self._control.tell(path, body, self._update_timeout_s)
        if failure is not None:
            raise ServerFailed(self.url, doing, failure)

    async def close(self) -> None:
        await self._turns.close()
        await self._control.close()

    def _or_raise(self, document: dict[str, Any] | RemoteFailure, doing: str) -> dict[str, Any]:
        if isinstance(document, RemoteFailure):
            raise ServerFailed(self.url, doing, document)
        return document


def refuse_impossible(logprobs: Sequence[float]) -> None:
    """Raise ``ValueError`` that names one that is no log-probability."""
    if wrong := [logprob for logprob in logprobs if not -math.inf < logprob < _MAX_LOGPROB]:
        raise ValueError(f"a log-probability of {wrong[0]} came; it must be finite and at most 0")


def make_completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[VersionSpan],
    reason: str,
    max_tokens: int,
) -> Completion:
    """The turn; raises ``TurnAborted``, and ``ValueError`` where its parts do not fit together."""
    if reason == "abort":
        raise TurnAborted("the server was told to abort the turn")
    if reason not in _ENDS:
        raise ValueError(f"it ended with {reason!r}")
    num_tokens = len(token_ids)
    if num_tokens != len(logprobs) or not 0 < num_tokens <= max_tokens:
        raise ValueError(
            f"{num_tokens} tokens with {len(logprobs)} log-probabilities came, {max_tokens} were "
            "asked for"
        )
    refuse_impossible(logprobs)
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions) or span.end > num_tokens:
            place = f"tokens {span.start} to {span.end}, after {len(versions)} of {num_tokens}"
            raise ValueError(f"version {span.version} is said to be of the {place}")
        versions += [span.version] * (span.end - span.start)
    if len(versions) != num_tokens:
        raise ValueError(f"{num_tokens} tokens came with {len(versions)} versions")
    return Completion(tuple(token_ids), tuple(logprobs), tuple(versions), _ENDS[reason])

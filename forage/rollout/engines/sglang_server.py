"""An SGLang server in its own words: ``/generate``, pauses, and weights from files.

Written to the schema of SGLang 0.5; there is no build for a CPU, so it has met a stand-in of that
schema and no real server.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from forage.remote.json_server import JsonServer
from forage.remote.openai_client import is_overflow
from forage.remote.request import RemoteFailure
from forage.rollout.engines.completions_engine import request_seed
from forage.rollout.engines.engine_server import ServerFailed, TurnAborted
from forage.types import (
    Completion,
    ContextOverflow,
    EngineError,
    FailureKind,
    FinishReason,
    Sampling,
)

_HEALTH_S = 10.0
_KEEPALIVE_S = 2.0
_CONTROL_CONNECTIONS = 8
_ENDS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _Reason(BaseModel):
    type: str


class _Span(BaseModel):
    version: int
    start: int
    end: int


class _Meta(BaseModel):
    finish_reason: _Reason
    output_token_logprobs: list[tuple[float, int, str | None]]
    weight_versions: list[_Span]


class _Turn(BaseModel):
    """The part of a reply that is read."""

    output_ids: list[int]
    meta_info: _Meta


class SglangServer:
    """See ``EngineServer``; ``update_timeout_s`` is for each step of an update."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        update_timeout_s: float,
        max_connections: int,
        keeps_keys: bool = False,
    ) -> None:
        """``keeps_keys``: turns in flight go on over keys and values of the older weights."""
        self.url = url
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s
        self._pause_mode = "in_place" if keeps_keys else "retract"
        self._turns = JsonServer(url, max_connections, _KEEPALIVE_S)
        self._http = JsonServer(url, _CONTROL_CONNECTIONS)
        self._numbers = itertools.count()

    async def sample(self, token_ids: Sequence[int], sampling: Sampling, salt: str) -> Completion:
        """Sample one turn; see ``EngineServer``. A turn cancelled here is aborted there."""
        rid = f"{sampling.episode_key}/{salt}/{next(self._numbers)}"
        body = {
            "rid": rid,
            "session_id": sampling.episode_key,
            "input_ids": list(token_ids),
            "sampling_params": _sampling_params(sampling, len(token_ids)),
            "return_logprob": True,
            "extra_key": salt,
        }
        try:
            document = await self._turns.post("/generate", body, self._timeout_s)
        except BaseException:
            await self._http.post("/abort_request", {"rid": rid}, _HEALTH_S)
            raise
        if isinstance(document, RemoteFailure):
            if is_overflow(document):
                raise ContextOverflow(document.detail)
            if document.kind is FailureKind.REFUSED and not document.may_pass:
                raise EngineError(f"{self.url} refuses the turn: {document.detail}")
            raise ServerFailed(self.url, "sample a turn", document)
        try:
            return _read_turn(document, sampling.max_tokens)
        except ValueError as error:
            failure = RemoteFailure(FailureKind.MALFORMED, f"its reply is no turn: {error}")
            raise ServerFailed(self.url, "sample a turn", failure) from None

    async def is_alive(self) -> bool:
        return not isinstance(await self._http.get("/health", _HEALTH_S), RemoteFailure)

    async def version(self) -> str:
        document = await self._http.get("/get_model_info", self._update_timeout_s)
        return str(self._or_raise(document, "name its weights").get("weight_version"))

    async def pause(self) -> None:
        await self._post("/pause_generation", {"mode": self._pause_mode}, "pause")

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, "go on")

    async def forget_keys(self) -> None:
        """Keys and values of older weights go; retracted turns compute theirs anew."""
        await self._post("/flush_cache", {}, "drop its cache")

    async def load_from_disk(self, folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": False}
        reply = await self._post("/update_weights_from_disk", body, f"load {folder}")
        if reply.get("success") is False:
            why = str(reply.get("message"))
            raise ServerFailed.for_good(self.url, f"load {folder}", why)

    async def close(self) -> None:
        await self._turns.close()
        await self._http.close()

    async def _post(self, path: str, body: dict[str, Any], doing: str) -> dict[str, Any]:
        return self._or_raise(await self._http.post(path, body, self._update_timeout_s), doing)

    def _or_raise(self, document: dict[str, Any] | RemoteFailure, doing: str) -> dict[str, Any]:
        if isinstance(document, RemoteFailure):
            raise ServerFailed(self.url, doing, document)
        return document


def _sampling_params(sampling: Sampling, position: int) -> dict[str, Any]:
    """Every knob of the distribution: one left out would have the server's default."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": request_seed(sampling, position),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "ignore_eos": False,
    }


def _read_turn(document: dict[str, Any], max_tokens: int) -> Completion:
    """The turn; raises ``TurnAborted``, and ``ValueError`` for what is no turn."""
    try:
        turn = _Turn.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    reason, logprobs = turn.meta_info.finish_reason.type, turn.meta_info.output_token_logprobs
    if reason == "abort":
        raise TurnAborted("the server was told to abort the turn")
    if reason not in _ENDS:
        raise ValueError(f"it ended with {reason!r}")
    if turn.output_ids != [token_id for _, token_id, _ in logprobs]:
        raise ValueError("its log-probabilities are of other tokens than those it gives")
    if not 0 < len(turn.output_ids) <= max_tokens:
        raise ValueError(f"{len(turn.output_ids)} tokens came, {max_tokens} were asked for")
    versions: list[int] = []
    for span in turn.meta_info.weight_versions:
        versions += [span.version] * (span.end - span.start)
    if len(versions) != len(turn.output_ids):
        raise ValueError(f"{len(turn.output_ids)} tokens came with {len(versions)} versions")
    return Completion(
        tuple(turn.output_ids),
        tuple(logprob for logprob, _, _ in logprobs),
        tuple(versions),
        _ENDS[reason],
    )

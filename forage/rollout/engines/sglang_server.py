"""An SGLang server in its own words: ``/generate``, pauses, and weights from files.

Written to the schema of SGLang 0.5; there is no build for a CPU, so it has met a stand-in of that
schema and no real server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from forage.rollout.engines.completions_engine import common_knobs, request_seed
from forage.rollout.engines.engine_http import EngineHttp, VersionSpan, make_completion
from forage.rollout.engines.engine_server import Part, ServerFailed
from forage.types import Completion, Sampling


class _Reason(BaseModel):
    type: str


class _Meta(BaseModel):
    finish_reason: _Reason
    output_token_logprobs: list[tuple[float, int, str | None]]
    weight_versions: list[VersionSpan]


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
        self._pause_mode = "in_place" if keeps_keys else "retract"
        self._http = EngineHttp(url, timeout_s, update_timeout_s, max_connections)
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
            read = partial(_read_turn, max_tokens=sampling.max_tokens)
            return await self._http.sample("/generate", body, read)
        except asyncio.CancelledError:
            await self._http.abort("/abort_request", {"rid": rid})
            raise

    async def is_alive(self) -> bool:
        return await self._http.is_alive()

    async def version(self) -> str:
        told = await self._http.get("/get_model_info", "name its weights")
        return str(told.get("weight_version"))

    async def pause(self) -> None:
        await self._http.post("/pause_generation", {"mode": self._pause_mode}, "pause")

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {}, "go on")

    async def sleep(self) -> None:
        """Give the GPU's memory back; the server needs --enable-memory-saver."""
        await self._http.post("/pause_generation", {"mode": "abort"}, "pause")
        tags = {"tags": ["weights", "kv_cache"]}
        await self._http.post("/release_memory_occupation", tags, "sleep")

    async def wake(self, part: Part) -> None:
        await self._http.post("/resume_memory_occupation", {"tags": [part]}, f"wake its {part}")

    async def forget_keys(self) -> None:
        """Keys and values of older weights go; retracted turns compute theirs anew."""
        await self._http.post("/flush_cache", {}, "drop its cache")

    async def load_from_disk(self, folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": False}
        reply = await self._http.post("/update_weights_from_disk", body, f"load {folder}")
        if reply.get("success") is False:
            why = str(reply.get("message"))
            raise ServerFailed.for_good(self.url, f"load {folder}", why)

    async def close(self) -> None:
        await self._http.close()


def _sampling_params(sampling: Sampling, position: int) -> dict[str, Any]:
    """Every knob of the distribution: one left out would have the server's default."""
    return {
        **common_knobs(sampling),
        "max_new_tokens": sampling.max_tokens,
        "top_k": -1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "sampling_seed": request_seed(sampling, position),
        "no_stop_trim": True,
        "ignore_eos": False,
    }


def _read_turn(document: dict[str, Any], max_tokens: int) -> Completion:
    """The turn; raises ``TurnAborted``, and ``ValueError`` for what is no turn."""
    turn = _Turn.model_validate(document)
    reason, sampled = turn.meta_info.finish_reason.type, turn.meta_info.output_token_logprobs
    if reason != "abort" and turn.output_ids != [token_id for _, token_id, _ in sampled]:
        raise ValueError("its log-probabilities are of other tokens than those it gives")
    logprobs, spans = [logprob for logprob, _, _ in sampled], turn.meta_info.weight_versions
    return make_completion(turn.output_ids, logprobs, spans, reason, max_tokens)

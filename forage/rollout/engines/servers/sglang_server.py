"""An SGLang server in its own words: ``/generate``, pauses, weights from files or through a group.

Written to the sources of SGLang 0.5.23; there is no build for a CPU, so it has met a stand-in of
that schema and no real server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from forage.rollout.engines.completions_engine import common_knobs, request_seed
from forage.rollout.engines.servers.engine_http import EngineHttp, VersionSpan, make_completion
from forage.rollout.engines.servers.engine_server import (
    Bucket,
    JoinInfo,
    Part,
    ServerFailed,
    Tensors,
)
from forage.types import Completion, FailureKind, Sampling

_UNTIL_IDLE_S = 10


class _Reason(BaseModel):
    type: str


class _Meta(BaseModel):
    """An aborted turn may come without log-probabilities and versions."""

    finish_reason: _Reason
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_versions: list[VersionSpan] = []


class _Turn(BaseModel):
    """The part of a reply that is read."""

    output_ids: list[int]
    meta_info: _Meta


class _TextMeta(BaseModel):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Text(BaseModel):
    """The part about the tokens of the prompt; the first has no log-probability."""

    meta_info: _TextMeta


class SglangServer:
    """See ``EngineServer``; ``update_timeout_s`` is for each step of an update."""

    group_name: str | None = "forage"
    """One for all runs: the group of a run that was killed is found, and destroyed, by its name."""

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

    async def logprobs_of(self, token_ids: Sequence[int], salt: str) -> list[float]:
        body = {
            "rid": f"text/{salt}/{next(self._numbers)}",
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": salt,
        }
        return await self._http.logprobs_of("/generate", body, partial(_read_text, token_ids))

    async def is_alive(self) -> bool:
        """Asks for its state: its /health samples a token, and so fails while it is paused."""
        return await self._http.is_alive("/server_info")

    async def version(self) -> str:
        told = await self._http.get("/model_info", "name its weights")
        return str(told.get("weight_version"))

    async def pause(self) -> None:
        await self._http.post("/pause_generation", {"mode": self._pause_mode}, "pause")

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {}, "go on")

    async def sleep(self) -> None:
        """Give the GPU's memory back; the server needs --enable-memory-saver."""
        await self._http.post("/pause_generation", {"mode": "abort"}, "pause")
        # Told to release its memory while a batch is under way, it would end.
        await self._http.tell(f"/flush_cache?timeout={_UNTIL_IDLE_S}", {}, "end its turns")
        tags = {"tags": ["weights", "kv_cache"]}
        await self._http.tell("/release_memory_occupation", tags, "sleep")

    async def wake(self, part: Part) -> None:
        await self._http.tell("/resume_memory_occupation", {"tags": [part]}, f"wake its {part}")

    async def forget_keys(self) -> None:
        """Keys and values of older weights go; retracted turns compute theirs anew."""
        await self._http.tell("/flush_cache", {}, "drop its cache")

    async def load_from_disk(self, folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": False}
        await self._do("/update_weights_from_disk", body, f"load {folder}")

    async def num_workers(self) -> int:
        """Its tensor-parallel ranks; raises ``ServerFailed`` where those are not all of them.

        A worker's rank in the group is the offset and its tensor-parallel rank, so that two stages
        of a pipeline would have the same; SGLang itself refuses data-parallel replicas.
        """
        doing = "count its workers"
        info = await self._http.get("/server_info", doing)
        number, stages = info.get("tp_size"), info.get("pp_size", 1)
        if not isinstance(number, int) or number < 1:
            raise ServerFailed.for_good(self.url, doing, f"it says that it has {number!r}")
        if stages != 1:
            why = f"its pipeline has {stages} stages: set placement.engine.transfer to disk"
            raise ServerFailed.for_good(self.url, doing, why)
        return number

    async def gpus(self) -> list[list[str]]:
        """None: SGLang names no GPU, so each is taken for one that the trainer does not use."""
        return []

    async def misfits(self, tensors: Tensors) -> list[str]:
        """None: no route of SGLang compares names or shapes with those of its model.

        A shape that does not fit is an error of ``receive``, and leaves the server half new. A name
        that the model does not know is a line in SGLang's log, and one that does not come at all
        keeps its older weights: neither is noticed here.
        """
        return []

    async def join(self, info: JoinInfo) -> None:
        """Join the trainer's group, and destroy an older one of the same name."""
        name = {"group_name": self.group_name}
        await self._try("/destroy_weights_update_group", name, "leave an older group")
        body = {
            "master_address": info.address,
            "master_port": info.port,
            "rank_offset": info.rank_offset,
            "world_size": info.world_size,
            "backend": info.backend,
            **name,
        }
        await self._do("/init_weights_update_group", body, "join the trainer's group")

    async def start_update(self) -> None:
        """Open a session; one that an update left open, of a run that was killed, ends first."""
        if not await self._try("/begin_weight_update", {}, "start an update"):
            await self._try("/end_weight_update", {}, "end an older update")
            await self._in_session("/begin_weight_update", "start an update")

    async def receive(self, bucket: Bucket) -> None:
        body = {
            "names": bucket.tensors.names,
            "dtypes": bucket.tensors.dtypes,
            "shapes": bucket.tensors.shapes,
            "group_name": self.group_name,
            "flush_cache": False,
        }
        await self._do("/update_weights_from_distributed", body, "receive weights")

    async def finish_update(self, version: str) -> None:
        """The version comes last: with a bucket it would be that of weights still to come."""
        await self._in_session("/end_weight_update", "end the update")
        body = {"new_version": version, "abort_all_requests": False}
        await self._do("/update_weight_version", body, "take a version")

    async def abandon_update(self) -> None:
        await self._try("/end_weight_update", {}, "abandon an update")
        name = {"group_name": self.group_name}
        await self._try("/destroy_weights_update_group", name, "leave the group")

    async def close(self) -> None:
        await self._http.close()

    async def _do(self, path: str, body: dict[str, Any], doing: str) -> None:
        """Raises ``ServerFailed`` where it does not answer, or says that it has not done it."""
        reply = await self._http.post(path, body, doing)
        if reply.get("success") is False:
            raise ServerFailed.for_good(self.url, doing, str(reply.get("message")))

    async def _try(self, path: str, body: dict[str, Any], doing: str) -> bool:
        """As ``_do`` for what there may be nothing to do: gives False where it is refused."""
        try:
            await self._do(path, body, doing)
        except ServerFailed as failed:
            if failed.failure.kind not in (FailureKind.REFUSED, FailureKind.MALFORMED):
                raise
            return False
        return True

    async def _in_session(self, path: str, doing: str) -> None:
        """As ``_do``; SGLang before June 2026 has no such route, and needs no session."""
        try:
            await self._do(path, {}, doing)
        except ServerFailed as failed:
            if failed.failure.status != HTTPStatus.NOT_FOUND:
                raise


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


def _read_text(token_ids: Sequence[int], document: dict[str, Any]) -> list[float]:
    """The log-probability of each token but the first; raises ``ValueError`` where one lacks."""
    told = _Text.model_validate(document).meta_info.input_token_logprobs
    values = [logprob for logprob, _, _ in told[1:] if logprob is not None]
    if [token_id for _, token_id, _ in told] != list(token_ids) or len(values) != len(told) - 1:
        raise ValueError(f"{len(values)} log-probabilities of {len(told)} tokens came")
    return values

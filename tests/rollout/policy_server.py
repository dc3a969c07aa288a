"""A stand-in for a vLLM server: its routes over real HTTP, a model that counts, and faults.

The model writes ``last id + 1`` and so on; what it was asked is kept. It has weights only by name:
``update`` steps are noted, and their version is what the tokens bear.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from forage.environment.codec import Codec
from forage.retrieval.serve.port import bind_port
from forage.rollout.engines.vllm_settings import RECEIVER_VERSION

VOCABULARY = 50


@dataclass
class PolicyServer:
    """``faults`` are given to the next turns, first to last; change any field between requests."""

    faults: deque[Response] = field(default_factory=deque)
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of a turn's choice that are other than they should be."""
    model_config: dict[str, Any] = field(
        default_factory=lambda: {
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "max_model_len": 1000,
        }
    )
    transfer: dict[str, Any] = field(default_factory=lambda: {"backend": "forage"})
    receiver: int = RECEIVER_VERSION
    scheduler: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    max_logprobs: int = 100
    lora_rank: int = 0
    codec: Codec | None = None
    """What its tokens read in; without it they read as nothing."""
    about: str = "0.32.0"
    without: frozenset[str] = frozenset()
    """Routes, and methods of its workers, that it does not have."""
    misfits: list[str] = field(default_factory=list)
    gpu: list[str] = field(default_factory=list)
    drawing: str = ""
    """Its model, as vLLM draws it."""
    columns: dict[str, list[float]] = field(default_factory=dict)
    broken: str = ""
    """A route, or a method of its workers, that answers with an error."""
    keeps_version: bool = False
    is_asleep: bool = False
    """It answers no turn, as after a pause, until it is told to go on."""
    dropped: set[str] = field(default_factory=set)
    """Parts of its memory that sleep."""
    version: str = "default"
    turns: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sleep_levels: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """Turns wait for it where there is one."""
    num_waiting: int = 0
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()
        gets = {"/health": self._ok, "/version": self._version, "/server_info": self._info}
        gets |= {"/weight_info": self._weights, "/get_world_size": self._size}
        gets |= {"/is_sleeping": self._state, "/v1/models": self._models}
        posts = {"/inference/v1/generate": self._generate, "/collective_rpc": self._call}
        posts["/finish_weight_update"] = self._finish
        posts["/update_weight_version"] = self._label
        for path in ("pause", "resume", "reset_prefix_cache", "start_weight_update"):
            posts[f"/{path}"] = self._note
        posts["/sleep"] = self._sleep
        posts["/wake_up"] = self._wake
        posts |= {"/update_weights": self._note, "/init_weight_transfer_engine": self._note}
        posts["/v1/load_lora_adapter"] = self._note
        for path, handle in gets.items():
            if path not in self.without:
                app.get(path)(handle)
        for path, handle in posts.items():
            if path not in self.without:
                app.post(path)(handle)
        return app

    async def _ok(self) -> Response:
        return Response()

    async def _version(self) -> dict[str, str]:
        return {"version": self.about}

    async def _info(self) -> dict[str, Any]:
        config = {
            "model_config": self.model_config,
            "weight_transfer_config": self.transfer,
            "scheduler_config": self.scheduler,
            "device_config": {"device": self.device},
            "lora_config": {"max_lora_rank": self.lora_rank} if self.lora_rank else None,
        }
        return {"vllm_config": config}

    async def _weights(self) -> dict[str, str]:
        return {"weight_version": self.version}

    async def _state(self) -> dict[str, bool]:
        return {"is_sleeping": self.is_asleep}

    async def _models(self) -> dict[str, Any]:
        return {"data": [{"id": "policy"}]}

    async def _size(self) -> dict[str, int]:
        return {"world_size": 1}

    async def _note(self, request: Request) -> Response:
        self.notes.append(request.url.path)
        if request.url.path == self.broken:
            return JSONResponse({"error": "it is broken"}, 500)
        self.is_asleep &= request.url.path != "/resume"
        return JSONResponse({})

    async def _sleep(self, request: Request) -> Response:
        self.sleep_levels.append(request.query_params["level"])
        return await self._note(request)

    async def _wake(self, request: Request) -> dict[str, str]:
        part = request.query_params["tags"]
        self.notes.append(f"/wake_up {part}")
        self.dropped.discard(part)
        return {"status": "sleeping" if self.dropped else "awake"}

    async def _finish(self, request: Request) -> Response:
        self.notes.append(request.url.path)
        if request.url.path == self.broken:
            return JSONResponse({"error": "it is broken"}, 500)
        if not self.keeps_version:
            self.version = (await request.json())["weight_version"]
        return JSONResponse({})

    async def _label(self, request: Request) -> dict[str, str]:
        self.version = (await request.json())["new_version"]
        return {}

    async def _call(self, request: Request) -> Any:
        method = (await request.json())["method"]
        if method in self.without:
            said = f"Call to collective_rpc method failed: Method {method!r} is not implemented."
            return JSONResponse({"error": {"message": said}}, 500)
        if method != "receiver_version":  # which is asked before a run, and no step of an update
            self.notes.append(method)
        if method == self.broken:
            return JSONResponse({"error": "it is broken"}, 500)
        answers: dict[str, Any] = {"check_weights": self.misfits, "name_gpu": self.gpu}
        answers["receiver_version"] = self.receiver
        answers |= {"get_model_inspection": self.drawing, "first_columns": self.columns}
        return {"results": [answers.get(method)]}

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.turns.append(body)
        if self.gate is not None:
            self.num_waiting += 1
            await self.gate.wait()
            self.num_waiting -= 1
        if self.is_asleep:
            return JSONResponse({"error": "it sleeps"}, 503)
        if self.faults:
            return self.faults.popleft()
        if not re.fullmatch(r"[^@/\\\x00]{1,128}", body.get("cache_salt", "none")):
            return JSONResponse({"error": "a cache_salt that vLLM 0.32 refuses"}, 400)
        if body["sampling_params"].get("logprobs", 0) > self.max_logprobs:
            return JSONResponse({"error": "more logprobs than max_logprobs"}, 400)
        last, number = body["token_ids"][-1], body["sampling_params"]["max_tokens"]
        ids = [(last + 1 + index) % VOCABULARY for index in range(number)]
        choice = {
            "token_ids": ids,
            "finish_reason": "length",
            "logprobs": {
                "content": [
                    {"logprob": -0.5 - index, "top_logprobs": _candidates(body, index, token_id)}
                    for index, token_id in enumerate(ids)
                ]
            },
            "weight_versions": [{"version": self.version, "start": 0, "end": number}],
            "text": "" if self.codec is None else self.codec.decode(ids),
            **self.changes,
        }
        return JSONResponse({"choices": [choice]})


def _candidates(body: dict[str, Any], index: int, sampled: int) -> list[dict[str, float]]:
    """As vLLM does: the sampled token first, and the asked number in all.

    Tokens 0 and 1 are the likeliest, and all others but the sampled one were cut off.
    """
    number = body["sampling_params"].get("logprobs", 0)
    others = [(0, -0.0 - index), (1, -0.25 - index), *((40 + k, -9999.0) for k in range(number))]
    said = [(sampled, -0.5 - index), *others][:number]
    return [{"token_id": token_id, "logprob": logprob} for token_id, logprob in said]


@contextmanager
def policy_serving(server: PolicyServer, port: int = 0) -> Iterator[PolicyServer]:
    """The server on a thread of its own until the end; sets ``url``."""
    sock = bind_port("127.0.0.1", port)
    server.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    settings = uvicorn.Config(server.app(), log_level="warning", timeout_graceful_shutdown=0)
    running = uvicorn.Server(settings)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
    thread.start()
    while not running.started:
        assert thread.is_alive(), "the server ended before it was ready"
        time.sleep(0.005)
    try:
        yield server
    finally:
        running.should_exit = True
        thread.join()

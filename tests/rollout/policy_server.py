"""A stand-in for a vLLM server: its routes over real HTTP, a model that counts, and faults.

The model writes ``last id + 1`` and so on; requests are recorded. Its weights are only names:
``update`` steps are recorded, and tokens carry their version. It answers like the real server,
including wrong requests and wrong orders: ``test_vllm_contract.py`` tests both.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import Body, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from forage.environment.codec import Codec
from forage.retrieval.serve.port import bind_port
from forage.rollout.engines.servers.vllm_settings import RECEIVER_VERSION
from forage.rollout.engines.servers.weight_check import TextLogprobs
from tests.rollout.folder_models import load, logprobs_by
from tests.rollout.policy_words import (
    ABORTED,
    BUCKET,
    JOIN,
    METHODS,
    Turn,
    choice_of,
    misunderstood,
    refuse,
    refused,
    said_of_text,
)

PauseMode = Literal["abort", "wait", "keep"]
Embedded = Body(embed=True)


def counted_logprobs(token_ids: Sequence[int]) -> list[float]:
    """A text's log-probabilities if no weights are read: a function of each token's id."""
    return [-0.1 - token_id % 7 for token_id in token_ids[1:]]


@dataclass
class PolicyServer:
    """``faults`` apply to the next turns in order; any field may be changed between requests."""

    faults: deque[Response] = field(default_factory=deque)
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of a turn's choice that are wrong."""
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
    """The tokenizer that decodes its tokens; without one they decode to nothing."""
    about: str = "0.32.0"
    without: frozenset[str] = frozenset()
    """Routes, and methods of its workers, that are missing."""
    misfits: list[str] = field(default_factory=list)
    gpu: list[str] = field(default_factory=list)
    drawing: str = ""
    """Its model, in vLLM's printed form."""
    columns: dict[str, list[float]] = field(default_factory=dict)
    broken: str = ""
    """A route, or a method of its workers, that returns an error."""
    keeps_version: bool = False
    is_asleep: bool = False
    """Turns wait, as after a pause, until it is resumed."""
    dropped: set[str] = field(default_factory=set)
    """Parts of its memory that sleep; a turn that does not wait for them ends the server."""
    num_aborts: int = 0
    """How often all turns in flight were aborted."""
    is_updating: bool = False
    has_joined: bool = False
    has_weights: bool = True
    """False from the start of an update to its end: a turn in between ends the server."""
    is_dead: bool = False
    adapters: set[str] = field(default_factory=set)
    version: str = "default"
    turns: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sleep_levels: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """Turns wait for this event if it is set."""
    num_waiting: int = 0
    reads_weights: bool = False
    """Whether it loads the models in its folders, and scores texts with them."""
    text_logprobs: TextLogprobs = counted_logprobs
    """Its log-probabilities of a text's tokens; from the models, if it loads them."""
    wrong_by: float = 0.0
    """An offset added to those values."""
    without_texts: bool = False
    """Whether its replies lack the log-probabilities of a text."""
    texts: list[dict[str, Any]] = field(default_factory=list)
    """Requests for the log-probabilities of a text."""
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()
        app.exception_handler(HTTPException)(refused)
        app.exception_handler(RequestValidationError)(misunderstood)
        gets = {"/health": self._health, "/version": self._version, "/server_info": self._info}
        gets |= {"/weight_info": self._weights, "/get_world_size": self._size}
        gets |= {"/is_sleeping": self._state, "/v1/models": self._models}
        posts = {"/inference/v1/generate": self._generate, "/collective_rpc": self._call}
        posts |= {"/pause": self._pause, "/resume": self._resume}
        posts |= {"/sleep": self._sleep, "/wake_up": self._wake}
        posts |= {"/reset_prefix_cache": self._reset, "/init_weight_transfer_engine": self._join}
        posts |= {"/start_weight_update": self._start, "/update_weights": self._receive}
        posts |= {"/finish_weight_update": self._finish, "/update_weight_version": self._label}
        if self.lora_rank:
            posts["/v1/load_lora_adapter"] = self._load_adapters
        for path, handle in gets.items():
            if path not in self.without:
                app.get(path)(handle)
        for path, handle in posts.items():
            if path not in self.without:
                app.post(path)(handle)
        return app

    async def _health(self) -> Response:
        return Response(status_code=503 if self.is_dead else 200)

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
        return {"is_sleeping": self.is_asleep or bool(self.dropped)}

    async def _models(self) -> dict[str, Any]:
        names = ["policy", *sorted(self.adapters)]
        return {"data": [{"id": name, "max_model_len": self._room} for name in names]}

    async def _size(self) -> dict[str, int]:
        return {"world_size": 1}

    async def _note(self, request: Request) -> None:
        """Records a step; raises if it is the broken one."""
        self.notes.append(request.url.path)
        if request.url.path == self.broken:
            raise HTTPException(500, "it is broken")

    async def _pause(self, request: Request, mode: PauseMode = "abort") -> dict[str, str]:
        await self._note(request)
        self.is_asleep = True
        self.num_aborts += mode == "abort"
        return {"status": "paused"}

    async def _resume(self, request: Request) -> dict[str, str]:
        await self._note(request)
        self.is_asleep = False
        return {"status": "resumed"}

    async def _sleep(
        self,
        request: Request,
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        mode: PauseMode = "abort",
    ) -> dict[str, Any]:
        await self._pause(request, mode)
        self.sleep_levels.append(str(level))
        self.dropped = {"weights", "kv_cache"}
        return {"status": "sleeping", "level": level}

    async def _wake(self, tags: Annotated[list[str] | None, Query()] = None) -> dict[str, str]:
        """Resumes at once if nothing sleeps any more, even if it was only paused."""
        asked = [f"/wake_up {part}" for part in tags or ()]
        self.notes += asked
        if self.broken in asked:
            raise HTTPException(500, "it is broken")
        self.dropped = self.dropped.difference(tags) if tags else set()
        self.is_asleep &= bool(self.dropped)
        return {"status": "sleeping" if self.dropped else "awake"}

    async def _reset(
        self, request: Request, reset_running_requests: bool = False
    ) -> dict[str, bool]:
        await self._note(request)
        return {"success": True}

    async def _join(
        self, request: Request, init_info: Annotated[dict[str, Any], Embedded]
    ) -> dict[str, str]:
        await self._note(request)
        if init_info.keys() != JOIN:
            raise HTTPException(500, "Invalid init_info for ForageTransferEngine")
        self.has_joined = True
        return {}

    async def _start(self, request: Request) -> dict[str, str]:
        await self._note(request)
        if self.is_updating:
            raise HTTPException(500, "a weight update is already active")
        self.is_updating, self.has_weights = True, False
        return {}

    async def _receive(
        self, request: Request, update_info: Annotated[dict[str, Any], Embedded]
    ) -> dict[str, str]:
        await self._note(request)
        is_begun, self.is_updating = self.is_updating, False  # a failure ends the update
        if not is_begun:
            raise HTTPException(500, "start_weight_update must be called before update_weights.")
        if update_info.keys() != BUCKET or not self.has_joined:
            raise HTTPException(500, "Invalid update_info for ForageTransferEngine, or no group")
        self.is_updating = True
        return {}

    async def _finish(
        self, request: Request, weight_version: Annotated[str | None, Embedded] = None
    ) -> dict[str, str]:
        await self._note(request)
        if not self.is_updating:
            said = "finish_weight_update called without a matching start_weight_update."
            raise HTTPException(500, said)
        self.is_updating, self.has_weights = False, True
        if weight_version is not None and not self.keeps_version:
            self.version = weight_version
        return {}

    async def _label(self, new_version: Annotated[str, Embedded]) -> dict[str, bool]:
        self.version = new_version
        return {"success": True}

    async def _load_adapters(
        self,
        request: Request,
        lora_name: Annotated[str, Embedded],
        lora_path: Annotated[str, Embedded],
    ) -> Response:
        await self._note(request)
        if lora_name in self.adapters:
            raise HTTPException(400, f"The lora adapter '{lora_name}' has already been loaded.")
        if not Path(lora_path).is_dir():
            raise HTTPException(404, f"No adapter found for '{lora_path}'")
        self.adapters.add(lora_name)
        if self.reads_weights:
            self.text_logprobs = partial(logprobs_by, load(Path(lora_path)))
        return Response("Success: LoRA adapter added successfully.")

    async def _call(self, request: Request) -> Any:
        try:
            body = await request.json()
        except json.JSONDecodeError:
            raise HTTPException(400, "JSON decode error") from None
        if not isinstance(body, dict) or "method" not in body:
            raise HTTPException(400, "Missing 'method' in request body")
        said = "Call to collective_rpc method failed:"
        method, kwargs = body["method"], body.get("kwargs", {})
        if method not in METHODS or method in self.without:
            raise HTTPException(500, f"{said} Method {method!r} is not implemented.")
        if method != "receiver_version":  # which is requested before a run
            self.notes.append(method)
        if method == self.broken:
            raise HTTPException(500, "it is broken")
        if not kwargs.keys() <= METHODS[method]:
            raise HTTPException(500, f"{said} {method}() got an unexpected keyword argument")
        self._change_weights(method, kwargs)
        answers: dict[str, Any] = {"check_weights": self.misfits, "name_gpu": self.gpu}
        answers |= {"get_model_inspection": self.drawing, "first_columns": self.columns}
        answers["receiver_version"] = str(self.receiver)  # anything but JSON types is text
        return {"results": [answers.get(method)]}

    def _change_weights(self, method: str, kwargs: dict[str, Any]) -> None:
        """The effect of the loading methods; raises if there is nothing to load."""
        folder = kwargs.get("folder") or kwargs.get("weights_path")
        if method == "reload_weights":  # a failed one leaves layers without weights
            self.has_weights = folder is None
        if folder is not None and not Path(folder).is_dir():
            raise HTTPException(500, f"Call to collective_rpc method failed: no {folder}")
        if folder is not None and self.reads_weights:
            self.text_logprobs = partial(logprobs_by, load(Path(folder)))
        if method == "load_adapters" and not self.adapters:
            raise HTTPException(500, "Call to collective_rpc method failed: no adapters to replace")
        if method == "abandon_weight_update":
            self.is_updating = False
        if method in ("abandon_weight_update", "load_from_disk", "reload_weights"):
            self.has_weights = True

    async def _generate(self, turn: Turn, request: Request) -> Response:
        is_text = turn.sampling_params.prompt_logprobs is not None
        (self.texts if is_text else self.turns).append(await request.json())
        if self.gate is not None and not is_text:
            self.num_waiting += 1
            await self.gate.wait()
            self.num_waiting -= 1
        num_ids = None if self.codec is None else len(self.codec.tokenizer)
        refuse(turn, {"policy", *self.adapters}, self._room, num_ids, self.max_logprobs)
        num_aborts = self.num_aborts
        while self.is_asleep and self.num_aborts == num_aborts:
            if await request.is_disconnected():
                return Response()
            await asyncio.sleep(0.01)
        if self.num_aborts > num_aborts:
            return JSONResponse({"choices": [ABORTED]})
        if self.faults and not is_text:
            return self.faults.popleft()
        if self.is_dead or self.dropped or not self.has_weights:
            self.is_dead = True
            raise HTTPException(500, "EngineCore encountered an issue.")
        choice = choice_of(turn, self.version, self._room)
        if turn.output_mode == "text":
            choice["text"] = self.codec.decode(choice["token_ids"]) if self.codec else ""
        reply: dict[str, Any] = {"choices": [{**choice, **self.changes}]}
        if is_text and not self.without_texts:
            values = [value + self.wrong_by for value in self.text_logprobs(turn.token_ids)]
            reply["prompt_logprobs"] = said_of_text(turn.token_ids, values)
        return JSONResponse(reply)

    @property
    def _room(self) -> int:
        """The size of its context in tokens."""
        return self.model_config.get("max_model_len", 1000)


@contextmanager
def policy_serving(server: PolicyServer, port: int = 0) -> Iterator[PolicyServer]:
    """Runs the server on a separate thread until the end; sets ``url``."""
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

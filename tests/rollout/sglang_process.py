"""A stand-in for an SGLang server in a separate process: its routes, with torch behind them.

Its one worker treats a group like SGLang 0.5.23: it creates the group with torch's own helper,
waits as long as torch does by default, and receives tensor by tensor into new memory. Its model is
a table of names and shapes. ``sglang_serving`` runs it; it needs neither Forage nor SGLang.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

FIELDS: dict[str, set[str]] = {
    "/generate": {
        *("rid", "session_id", "input_ids", "sampling_params", "return_logprob"),
        *("logprob_start_len", "extra_key"),
    },
    "/abort_request": {"rid"},
    "/pause_generation": {"mode"},
    "/continue_generation": set(),
    "/flush_cache": set(),
    "/release_memory_occupation": {"tags"},
    "/resume_memory_occupation": {"tags"},
    "/update_weights_from_disk": {"model_path", "weight_version", "flush_cache"},
    "/init_weights_update_group": {
        *("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"),
    },
    "/destroy_weights_update_group": {"group_name"},
    "/begin_weight_update": set(),
    "/end_weight_update": set(),
    "/update_weights_from_distributed": {"names", "dtypes", "shapes", "group_name", "flush_cache"},
    "/update_weight_version": {"new_version", "abort_all_requests"},
    "/v1/detokenize": {"tokens", "skip_special_tokens"},
}
"""The routes that take a body, and those of their fields that Forage may send.

Read in ``srt/entrypoints/http_server.py`` and ``srt/managers/io_struct.py`` of
https://pypi.org/project/sglang/0.5.23/; "/flush_cache" has only a query.
"""

SERVER_INFO: dict[str, Any] = {
    **{"version": "0.5.23", "tp_size": 1, "pp_size": 1, "max_req_input_len": 1 << 20},
    **{"enable_memory_saver": True, "skip_tokenizer_init": False},
}
"""The fields of a server's report that Forage reads (``srt/utils/common.py``)."""

Reply = tuple[bool, Any]
Work = Callable[[dict[str, Any]], Reply]


class Worker:
    """SGLang's scheduler and its tensor-parallel rank 0, one request after another."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[int]] = {}
        """Shapes of its model's weights, as far as a test sets them; others are loaded
        unchecked.
        """
        self.loaded: dict[str, list[Any]] = {}
        self.sums: dict[str, float] = {}
        """A digest of the weights that it computes with."""
        self.keeps_weights = False
        """Whether it receives new weights, reports them, and computes with the old ones."""
        self.refuses_bucket = self.dies_at_bucket = -1
        self.needs_session = True
        self._groups: dict[str, Any] = {}
        self._in_session = False
        self._num_buckets = 0
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def init_weights_update_group(self, body: dict[str, Any]) -> Reply:
        name, size = body["group_name"], body["world_size"]
        try:
            address = f"tcp://{body['master_address']}:{body['master_port']}"
            patience = c10d.default_pg_timeout
            there = rendezvous(address, body["rank_offset"], size, timeout=patience)
            store, rank, size = next(iter(there))
            store.set_timeout(patience)
            store = c10d.PrefixStore(name, store)
            backend = c10d.Backend(body["backend"])
            asked = (size, rank, [], backend, store)
            group, _ = c10d._new_process_group_helper(*asked, group_name=name, timeout=patience)
            c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
            self._groups[name] = group
        except Exception as error:
            return False, f"Failed to initialize custom process group: {error}."
        return True, "Succeeded to initialize custom process group."

    def generate(self, body: dict[str, Any]) -> tuple[bool, list[Any]]:
        """The log-probabilities of a text, which stand-ins compute from sums of weights."""
        ids = body["input_ids"]
        values = [None, *logprobs_by(self.sums, ids)]
        return True, [[value, token_id, None] for value, token_id in zip(values, ids, strict=True)]

    def destroy_weights_update_group(self, body: dict[str, Any]) -> Reply:
        if body["group_name"] not in self._groups:
            return False, "The group to be destroyed does not exist."
        dist.destroy_process_group(self._groups.pop(body["group_name"]))
        return True, "Succeeded to destroy custom process group."

    def begin_weight_update(self, body: dict[str, Any]) -> Reply:
        if self._in_session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self._in_session, self._num_buckets = True, 0
        return True, "Success"

    def end_weight_update(self, body: dict[str, Any]) -> Reply:
        if not self._in_session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._in_session = False
        return True, "Success"

    def update_weights_from_distributed(self, body: dict[str, Any]) -> Reply:
        if self.needs_session and not self._in_session:
            return False, "must run between begin_weight_update() and end_weight_update()"
        if self._num_buckets == self.dies_at_bucket:
            os._exit(1)
        self._num_buckets += 1
        try:
            group, handles, weights = self._groups[body["group_name"]], [], {}
            rows = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
            for name, dtype, shape in rows:
                weight = weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                handles.append(dist.broadcast(weight, src=0, group=group, async_op=True))
            for handle in handles:
                handle.wait()
        except Exception as error:
            return False, f"Failed to receive weights: {error}"
        if self._num_buckets - 1 == self.refuses_bucket:
            return False, "Failed to update parameter online: out of memory."
        for name, weight in weights.items():
            if self.shapes.get(name, list(weight.shape)) != list(weight.shape):
                return False, f"Failed to update parameter online: the shape of {name}."
            self.loaded[name] = summary(weight)
            if not self.keeps_weights:
                self.sums[name] = weight.double().sum().item()
        return True, "Succeeded to update parameter online."


def logprobs_by(sums: dict[str, float], token_ids: Sequence[int]) -> list[float]:
    """A number for each token but the first, which depends on all weights."""
    return [-abs(math.sin(sum(sums.values()) + token_id)) for token_id in token_ids[1:]]


def summary(weight: torch.Tensor) -> list[Any]:
    """Equal for equal bits."""
    data = weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(weight.dtype), list(weight.shape), hashlib.sha256(data).hexdigest()]


@dataclass
class Faults:
    """Faults of the stand-in, set by ``POST /stand_in``."""

    without: str = ""
    """A part of the paths that are missing."""
    hangs_at: str = ""
    """A path at which the scheduler stops for good: it never answers again."""
    stages: int = 1


class Server:
    """SGLang's routes; one thread serves those of the worker, as SGLang's scheduler does."""

    def __init__(self) -> None:
        self._worker = Worker()
        self._faults = Faults()
        self._scheduler = ThreadPoolExecutor(1)
        self._version = "default"
        self._is_paused = False
        self._asked: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.Response:
        path = request.path
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        if path == "/stand_in":
            return self._stand_in(body)
        if path != "/health":
            self._asked.append(path)
        assert body.keys() <= FIELDS.get(path, set()), f"{path} has no such fields: {body.keys()}"
        if self._faults.without and self._faults.without in path:
            return web.json_response({"detail": "Not Found"}, status=404)
        match path:
            case "/health":
                return web.Response(status=503 if self._is_paused else 200)
            case "/server_info":
                await self._schedule(lambda _: (True, ""), body)
                return web.json_response(SERVER_INFO | {"pp_size": self._faults.stages})
            case "/model_info":
                return web.json_response({"weight_version": self._version})
            case "/v1/detokenize":  # it has no tokenizer
                return web.json_response({"detail": "Not Found"}, status=404)
            case "/update_weight_version":
                # By default it would end turns in flight.
                assert body["abort_all_requests"] is False
                self._version = body["new_version"]
                return web.json_response({"success": True, "message": ""})
            case "/pause_generation" | "/continue_generation":
                self._is_paused = path == "/pause_generation"
        if (reply := fixed_reply(path)) is not None:
            return reply
        work: Work = getattr(self._worker, path[1:])
        success, message = await self._schedule(
            _stop if path == self._faults.hangs_at else work, body
        )
        if path == "/generate":
            return web.json_response({"meta_info": {"input_token_logprobs": message}})
        status = 200 if success else 400
        return web.json_response({"success": success, "message": message}, status=status)

    async def _schedule(self, work: Work, body: dict[str, Any]) -> Reply:
        return await asyncio.get_running_loop().run_in_executor(self._scheduler, work, body)

    def _stand_in(self, body: dict[str, Any]) -> web.Response:
        """Sets the fields in ``body``; returns what was loaded and requested, and clears it."""
        for name, value in body.items():
            setattr(self._faults if hasattr(self._faults, name) else self._worker, name, value)
        told = {"loaded": self._worker.loaded, "asked": self._asked, "paused": self._is_paused}
        reply = web.json_response(told)
        self._asked, self._worker.loaded = [], {}
        return reply


def fixed_reply(path: str) -> web.Response | None:
    """SGLang's reply at a route where it is always the same; None for the other routes."""
    match path:
        case "/pause_generation" | "/continue_generation":
            done = "paused" if path == "/pause_generation" else "continued"
            said = {"message": f"Generation {done} successfully.", "status": "ok"}
            return web.json_response(said)
        case "/flush_cache":
            said = (
                "Cache flushed.\nPlease check backend logs for more details. (When there are "
                "running or waiting requests, the operation will not be performed.)\n"
            )
            return web.Response(body=said.encode())
        case "/release_memory_occupation" | "/resume_memory_occupation":
            return web.json_response(None)
        case "/abort_request":
            return web.Response()
    return None


def _stop(_: dict[str, Any]) -> Reply:
    while True:
        time.sleep(60.0)


@contextmanager
def sglang_serving(num_servers: int) -> Iterator[list[str]]:
    """The addresses of new stand-ins, which end with the block."""
    command = [sys.executable, "-m", __name__]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(num_servers)]
    try:
        urls: list[str] = []
        for process in started:
            assert process.stdout is not None
            port = process.stdout.readline().decode().strip()
            assert port, "the stand-in ended before it served"
            urls.append(f"http://127.0.0.1:{port}")
        for url in urls:
            urllib.request.urlopen(url + "/health", timeout=30).close()
        yield urls
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def _serve() -> None:
    runner = web.AppRunner(Server().app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    parent = os.getppid()
    while os.getppid() == parent:  # it must not outlive a killed test run
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_serve())
    os._exit(0)

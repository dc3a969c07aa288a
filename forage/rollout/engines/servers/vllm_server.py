"""A vLLM server in its own words: ``/inference/v1/generate``, and the routes that update weights.

Token ids go in and come back, each with the log-probability that it was sampled at and the version
of the weights behind it. Written for vLLM 0.32 as ``forage.cluster.model_servers`` starts it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from forage.remote.request import RemoteFailure
from forage.rollout.engines.servers.engine_http import EngineHttp
from forage.rollout.engines.servers.engine_server import (
    Bucket,
    Columns,
    JoinInfo,
    Part,
    ServerFailed,
    Tensors,
)
from forage.rollout.engines.servers.vllm_turn import (
    TEXT_PARAMS,
    read_text,
    read_turn,
    sampling_params,
)
from forage.types import Completion, Sampling

LOG = logging.getLogger(__name__)

_ADAPTERS = "adapters"
"""The name of the policy's adapters at a server that has the base alone."""


class VllmServer:
    """See ``EngineServer``; ``update_timeout_s`` is for each step of an update."""

    group_name: str | None = None

    def __init__(
        self,
        url: str,
        timeout_s: float,
        update_timeout_s: float,
        max_connections: int,
        keeps_base: bool = False,
    ) -> None:
        """``keeps_base``: updates bring adapters alone, so its weights must outlast its sleep."""
        self.url = url
        self._sleep_level = 1 if keeps_base else 2
        self._http = EngineHttp(url, timeout_s, update_timeout_s, max_connections)
        self._numbers = itertools.count()
        self._model: dict[str, str] = {}
        """What names the model in a turn: nothing for the one that is served."""

    async def sample(self, token_ids: Sequence[int], sampling: Sampling, salt: str) -> Completion:
        """Sample one turn; see ``EngineServer``. A turn cancelled here is aborted there."""
        body = {
            "request_id": f"{sampling.episode_key}/{next(self._numbers)}",
            "token_ids": list(token_ids),
            "sampling_params": sampling_params(sampling, len(token_ids)),
            "cache_salt": salt,
            **self._model,
        }
        read = partial(read_turn, sampling=sampling)
        return await self._http.sample("/inference/v1/generate", body, read)

    async def logprobs_of(self, token_ids: Sequence[int], salt: str) -> list[float]:
        body = {
            "request_id": f"text/{next(self._numbers)}",
            "token_ids": list(token_ids),
            "sampling_params": TEXT_PARAMS,
            "cache_salt": salt,
            **self._model,
        }
        read = partial(read_text, token_ids=token_ids)
        return await self._http.logprobs_of("/inference/v1/generate", body, read)

    async def is_alive(self) -> bool:
        return await self._http.is_alive()

    async def version(self) -> str:
        return str((await self._http.get("/weight_info", "name its weights")).get("weight_version"))

    async def num_workers(self) -> int:
        """Processes that hold a part of the weights: its ranks in the trainer's group."""
        doing = "count its workers"
        number = (await self._http.get("/get_world_size", doing)).get("world_size")
        if not isinstance(number, int) or number < 1:
            raise ServerFailed.for_good(self.url, doing, f"it says that it has {number!r}")
        return number

    async def gpus(self) -> list[list[str]]:
        """The GPU of each worker and NCCL's version there, as ``name_gpu`` says it."""
        doing = "name its GPUs"
        found = await self._call("name_gpu", {}, doing)
        if not isinstance(found, list) or not all(isinstance(each, list) for each in found):
            raise ServerFailed.for_good(self.url, doing, f"its workers say {found!r}")
        return found

    async def pause(self) -> None:
        await self._http.post("/pause?mode=keep&clear_cache=false", {}, "pause")

    async def resume(self) -> None:
        await self._http.post("/resume", {}, "go on")

    async def sleep(self) -> None:
        """Give the GPU's memory back; does nothing on a CPU.

        Level 1 keeps the weights in host memory, level 2 drops them: the next update brings them.
        """
        await self._http.post(f"/sleep?level={self._sleep_level}&mode=abort", {}, "sleep")

    async def wake(self, part: Part) -> None:
        await self._http.post(f"/wake_up?tags={part}", {}, f"wake its {part}")

    async def take_over(self) -> bool:
        """Let it go on, and wake it, if a run that was killed has left it paused or asleep.

        Returns whether one has: then its weights may be half new, or gone, before the first update.
        """
        state = await self._http.get("/is_sleeping", "say whether it sleeps")
        if not state.get("is_sleeping"):  # so it says of a pause, too
            return False
        LOG.warning("the server %s was left paused or asleep: it goes on", self.url)
        # First: one that was only paused goes on as soon as it is woken, and a turn that meets
        # layers without weights ends it.
        await self._abandon_if_it_can()
        await self.wake("weights")
        await self.wake("kv_cache")
        await self.resume()
        return True

    async def _abandon_if_it_can(self) -> None:
        try:
            await self.abandon_update()
        except ServerFailed as failed:  # without the receiver there is no update to end
            if not is_unknown("abandon_weight_update", failed.failure):
                raise

    async def forget_keys(self) -> None:
        """Keys and values of older weights go; turns in flight compute theirs anew."""
        await self._http.post(
            "/reset_prefix_cache?reset_running_requests=true", {}, "drop its cache"
        )

    async def misfits(self, tensors: Tensors) -> list[str]:
        """Why these tensors are not those of the served model, a sentence each.

        A server without the receiver says nothing; ``find_faults`` compares its sizes.
        """
        kwargs = {"names": tensors.names, "shapes": tensors.shapes}
        doing = "check the weights' names"
        try:
            found = await self._call("check_weights", kwargs, doing)
        except ServerFailed as failed:
            if is_unknown("check_weights", failed.failure):
                return []
            raise
        if not isinstance(found, list) or not found:
            raise ServerFailed.for_good(self.url, doing, f"its workers say {found!r}")
        return found[0] if isinstance(found[0], list) else [str(found[0])]

    async def other_base(self, columns: Columns) -> list[str]:
        """Why its base is another one than that of these columns, a sentence each.

        Columns that the server does not keep as such, or has quantized, are not compared.
        """
        doing = "say what its base is"
        found = await self._call("first_columns", {"names": list(columns)}, doing)
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise ServerFailed.for_good(self.url, doing, f"its workers say {found!r}")
        theirs: Columns = {}
        for of_worker in reversed(found):  # the first has the first rows of what is cut
            theirs |= of_worker
        if not theirs:
            LOG.warning("the server %s: its base cannot be compared with model.path", self.url)
        others = {name: _first_other(theirs.get(name, []), mine) for name, mine in columns.items()}
        return [
            f"{name} has {pair[0]:.6g} in its first column there, and {pair[1]:.6g} here"
            for name, pair in others.items()
            if pair is not None
        ]

    async def join(self, info: JoinInfo) -> None:
        """Join the trainer's group, which the trainer makes at the same time."""
        body = {"init_info": asdict(info)}
        await self._http.post("/init_weight_transfer_engine", body, "join the trainer's group")

    async def start_update(self) -> None:
        await self._http.post("/start_weight_update", {}, "start an update")

    async def receive(self, bucket: Bucket) -> None:
        """Take a bucket, which the trainer broadcasts at the same time."""
        info = {
            **asdict(bucket.tensors),
            "starts": bucket.starts,
            "num_bytes": bucket.num_bytes,
        }
        await self._http.post("/update_weights", {"update_info": info}, "receive weights")

    async def finish_update(self, version: str) -> None:
        await self._http.post(
            "/finish_weight_update", {"weight_version": version}, "end the update"
        )

    async def abandon_update(self) -> None:
        """End an update that will not go on: the weights are half new until the next one."""
        await self._call("abandon_weight_update", {}, "abandon an update")

    async def load_from_disk(self, folder: Path, version: str) -> None:
        """Through the receiver's method, or through vLLM's own where there is no receiver.

        ``find_faults`` refuses a server that vLLM's own would leave with its old head.
        """
        try:
            await self._call("load_from_disk", {"folder": str(folder)}, f"load {folder}")
        except ServerFailed as failed:
            if not is_unknown("load_from_disk", failed.failure):
                raise
            await self._reload_by_itself(folder)
        await self._http.post("/update_weight_version", {"new_version": version}, "take a version")

    async def _reload_by_itself(self, folder: Path) -> None:
        doing = f"load {folder}"
        try:
            await self._call("reload_weights", {"weights_path": str(folder)}, doing)
        except ServerFailed:
            # Layers are without weights, and the next turn would end the server. A load of nothing
            # puts back what they had.
            with suppress(ServerFailed):
                await self._call("reload_weights", {"weights_iterator": []}, doing)
            raise

    async def load_adapters(self, folder: Path, version: str) -> None:
        """Adapters of peft in the place of those that it has; turns name them from then on."""
        if _ADAPTERS in await self._models():
            await self._call("load_adapters", {"folder": str(folder)}, f"load {folder}")
        else:
            body = {"lora_name": _ADAPTERS, "lora_path": str(folder)}
            await self._http.tell("/v1/load_lora_adapter", body, f"load {folder}")
        self._model = {"model": _ADAPTERS}
        await self._http.post("/update_weight_version", {"new_version": version}, "take a version")

    async def close(self) -> None:
        await self._http.close()

    async def _models(self) -> list[str]:
        doing = "name its models"
        models = (await self._http.get("/v1/models", doing)).get("data")
        if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
            raise ServerFailed.for_good(self.url, doing, f"it says that they are {models!r}")
        return [str(model.get("id")) for model in models]

    async def _call(self, method: str, kwargs: dict[str, Any], doing: str) -> Any:
        """A method of all its workers: what each of them says, if the server is vLLM's."""
        body = {"method": method, "kwargs": kwargs}
        return (await self._http.post("/collective_rpc", body, doing)).get("results")


def is_unknown(method: str, failure: RemoteFailure) -> bool:
    """Whether its workers have no such method: vLLM says so in these words."""
    return f"Method {method!r} is not implemented" in failure.said


def _first_other(theirs: Sequence[float], mine: Sequence[float]) -> tuple[float, float] | None:
    """The first pair that is not the same number in two types: bfloat16 keeps 8 bits."""
    pairs = zip(theirs, mine, strict=False)  # a worker may have a part of the rows
    other = (pair for pair in pairs if not math.isclose(*pair, rel_tol=2**-7, abs_tol=1e-7))
    return next(other, None)

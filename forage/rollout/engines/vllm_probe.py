"""What a vLLM server lacks for training: routes, settings, the model. Asked before a run begins.

``forage doctor --server URL`` prints what is found here; a run refuses to start with it. Names and
shapes of the weights are compared at the first update, by the server's own workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forage.config.shipped_recipes import shipped
from forage.environment.codec import Codec
from forage.remote.json_server import JsonServer
from forage.remote.request import RemoteFailure
from forage.rollout.engines.completions_engine import PROBE, PROBE_TOKENS, reads_alike

KNOWN_VERSION = "0.32"

_TIMEOUT_S = 20.0
_ACCOUNT_S = 180.0  # its account of itself lists every package of its environment
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
_ROUTES = {
    "/inference/v1/generate": "start it with --enable-scale-out",
    "/start_weight_update": _DEV_MODE,
    "/update_weights": _DEV_MODE,
    "/finish_weight_update": _DEV_MODE,
    "/weight_info": _DEV_MODE,
    "/collective_rpc": _DEV_MODE,
    "/reset_prefix_cache": _DEV_MODE,
    "/pause": _DEV_MODE,
    "/resume": _DEV_MODE,
}
_ROUTES_OF_SLEEP = {"/sleep": _DEV_MODE, "/wake_up": _DEV_MODE}
_MOST_ALTERNATIVES = 20
"""The most that ``rollout.num_alternatives`` may ask for."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a server, and what to do about it."""

    what: str
    remedy: str
    is_fatal: bool = True

    def __str__(self) -> str:
        return f"{self.what} ({self.remedy})"


async def find_faults(
    url: str,
    has_receiver: bool,
    max_tokens: int = 0,
    codec: Codec | None = None,
    lora_rank: int = 0,
    num_alternatives: int | None = 0,
    sleeps: bool | None = False,
) -> list[Fault]:
    """What is wrong with the server at ``url``.

    ``has_receiver``: whether it should have Forage's. ``max_tokens`` is the budget of an episode,
    ``codec`` has the recipe's tokenizer; without them they are not compared. ``lora_rank`` is that
    of adapters which it should hold beside its model, ``num_alternatives`` that of the recipe's
    rollout: None where no recipe is known, so that too few for some recipe are no fatal fault.
    ``sleeps`` is ``placement.engine.offload``, and None likewise.
    """
    http = JsonServer(url, max_connections=4)
    try:
        health = await http.get("/health", _TIMEOUT_S)
        if isinstance(health, RemoteFailure):
            remedy = "is it running, and is this its address?"
            return [Fault(f"it does not answer at /health: {health.detail}", remedy)]
        faults = await _missing_routes(http, {**_ROUTES, **(_ROUTES_OF_SLEEP if sleeps else {})})
        if faults and faults[-1].is_fatal:
            return faults
        faults += await _wrong_settings(http, has_receiver, max_tokens, lora_rank, sleeps)
        if paused := await _paused(http):
            return [*faults, paused]  # whatever it were asked to sample would wait
        if codec is not None:
            faults += await _other_tokenizer(http, codec)
        if num_alternatives != 0:
            faults += await _too_few_alternatives(http, num_alternatives)
        return faults
    finally:
        await http.close()


async def _missing_routes(http: JsonServer, routes: Mapping[str, str]) -> list[Fault]:
    """Its version, where that is another than the one this is written for, and its routes."""
    faults: list[Fault] = []
    about = await http.get("/version", _TIMEOUT_S)
    version = "" if isinstance(about, RemoteFailure) else str(about.get("version", ""))
    if not version.startswith(KNOWN_VERSION):
        remedy = f"Forage is tested with vLLM {KNOWN_VERSION}"
        faults.append(Fault(f"its version is {version or 'unknown'}", remedy, is_fatal=False))
    pages = await http.get("/openapi.json", _ACCOUNT_S)  # seconds of work at the first request
    if isinstance(pages, RemoteFailure):
        remedy = "is it busy, or started with --disable-fastapi-docs?"
        return [*faults, Fault(f"it does not list its routes: {pages.detail}", remedy)]
    paths = _part(pages, "paths")
    for route, remedy in routes.items():
        if route not in paths:
            faults.append(Fault(f"it has no {route}", remedy))
    return faults


async def _wrong_settings(
    http: JsonServer, has_receiver: bool, max_tokens: int, lora_rank: int, sleeps: bool | None
) -> list[Fault]:
    about = await http.get("/server_info?config_format=json", _ACCOUNT_S)
    if isinstance(about, RemoteFailure):
        return [Fault(f"it does not say how it was started: {about.detail}", _DEV_MODE)]
    config = _part(about, "vllm_config")
    if not config:
        remedy = f"is it a vLLM server of version {KNOWN_VERSION}?"
        return [Fault("it does not say how it was started: its reply has no vllm_config", remedy)]
    model, transfer = _part(config, "model_config"), _part(config, "weight_transfer_config")
    faults: list[Fault] = []
    if (mode := model.get("logprobs_mode")) != "processed_logprobs":
        remedy = "start it with --logprobs-mode processed_logprobs"
        faults.append(Fault(f"its log-probabilities are {mode}", remedy))
    if (source := model.get("generation_config")) != "vllm":
        remedy = "start it with --generation-config vllm"
        faults.append(Fault(f"its sampling defaults come from {source!r}", remedy, is_fatal=False))
    if (longest := _number(model, "max_model_len")) < max_tokens:
        remedy = f"start it with --max-model-len {max_tokens}, or lower environment.max_tokens"
        faults.append(Fault(f"its context of {longest} tokens holds no episode", remedy))
    if has_receiver and transfer.get("backend") != "forage":
        remedy = (
            f"start it with {shipped('plugins')} (forage recipes --out DIR copies it) on "
            "PYTHONPATH, --worker-extension-cls "
            "forage_receiver.Receiver and --weight-transfer-config "
            '\'{"backend": "forage"}\', or set placement.engine.transfer: disk'
        )
        faults.append(Fault("it has no receiver for weights", remedy))
    room = _number(_part(config, "lora_config"), "max_lora_rank")
    if room < lora_rank:
        remedy = (
            f"start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, --enable-lora "
            f"and --max-lora-rank {lora_rank} or more, or set placement.engine.transfer: group"
        )
        faults.append(Fault(f"it has room for adapters of rank {room}", remedy))
    scheduler = _part(config, "scheduler_config")
    device = _part(config, "device_config").get("device_type", "")
    if device == "cpu" and scheduler.get("enable_chunked_prefill"):
        remedy = "start it with --no-enable-chunked-prefill --max-num-batched-tokens 8192"
        faults.append(Fault("seeded sampling after a chunked prefill ends it on a CPU", remedy))
    keeps_memory = device != "cpu" and model.get("enable_sleep_mode") is False
    if keeps_memory and sleeps is not False:
        remedy = "start it with --enable-sleep-mode, which placement.engine.offload needs"
        what = "it keeps its GPU's memory while it sleeps"
        faults.append(Fault(what, remedy, is_fatal=sleeps is not None))
    return faults


async def _paused(http: JsonServer) -> Fault | None:
    """Whether it samples nothing because it was told so; also said of one that sleeps."""
    state = await http.get("/is_sleeping", _TIMEOUT_S)
    if isinstance(state, RemoteFailure) or not state.get("is_sleeping"):
        return None
    remedy = (
        "a run that uses it now is changing its weights, or one that was killed has left it so: "
        "the next run lets it go on. So does POST /wake_up, then POST /resume; but if it slept it "
        "has no weights before POST /collective_rpc with the method reload_weights"
    )
    return Fault("it is paused or asleep", remedy)


async def _other_tokenizer(http: JsonServer, codec: Codec) -> list[Fault]:
    """Whether what it samples reads alike in its tokenizer and in the recipe's."""
    body = {
        "token_ids": codec.encode_trusted(PROBE),
        "output_mode": "text",
        "sampling_params": {
            "max_tokens": PROBE_TOKENS,
            "temperature": 0.0,
            "skip_special_tokens": False,
        },
    }
    reply = await http.post("/inference/v1/generate", body, _TIMEOUT_S)
    if isinstance(reply, RemoteFailure):
        return [Fault(f"it cannot sample: {reply.detail}", "look into its log")]
    try:
        (choice,) = reply["choices"]
        text, mine = str(choice["text"]), codec.decode(choice["token_ids"])
    except (KeyError, TypeError, ValueError, OverflowError):  # the last: an id beyond 64 bits
        return [Fault("its reply is no turn", "is it a vLLM server?")]
    if reads_alike(mine, text):
        return []
    remedy = "name the served model's own tokenizer with model.path"
    return [Fault(f"its tokens read {text!r} there and {mine!r} with model.path", remedy)]


async def _too_few_alternatives(http: JsonServer, number: int | None) -> list[Fault]:
    """Whether it gives as many alternatives beside a token as recipes ask for."""
    most = _MOST_ALTERNATIVES if number is None else number
    # The sampled token comes first, and counts.
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": most + 1}
    body = {"token_ids": [0, 1], "sampling_params": params}
    reply = await http.post("/inference/v1/generate", body, _TIMEOUT_S)
    if not isinstance(reply, RemoteFailure):
        return []
    recipe = f"recipes with rollout.num_alternatives: {most}" if number is None else "this recipe"
    remedy = f"start it with --max-logprobs {most + 1}, which {recipe} needs"
    what = f"it does not give {most} alternatives beside a token: {reply.detail}"
    return [Fault(what, remedy, is_fatal=number is not None)]


def _part(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of what the server tells, empty where it has none of that shape."""
    part = told.get(name)
    return part if isinstance(part, dict) else {}


def _number(told: Mapping[str, Any], name: str) -> int:
    number = told.get(name)
    return number if isinstance(number, int) else 0

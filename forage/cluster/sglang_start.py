"""The arguments and environment of the SGLang servers that a run starts (``server_start.py``).

Names, types and defaults are those of SGLang 0.5.23 (``srt/arg_groups/fields``, ``srt/environ.py``
of https://pypi.org/project/sglang/0.5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forage.config.run_config import RunConfig
from forage.config.server_config import ServerPlacement
from forage.rollout.engines.servers.sglang_probe import SPARE_TOKENS

_SHARED_MEMORY = "0.8"
"""The share of a GPU for weights and cache, if the trainer's process is on it too."""


def sglang_command(config: RunConfig, engine: ServerPlacement, program: Path) -> list[str]:
    """The ``sglang serve`` command that engine and updates need, without host and port.

    It keeps the tokenizer, which finds stop strings, and the prefix cache: each request names the
    version of its weights, and updates flush the cache. Seeds are left to SGLang, so that servers
    differ: with one seed, the members of a group on two servers would be sampled alike.
    """
    command = [str(program), "serve", "--model-path", config.model.path]
    command += ["--dtype", config.placement.dtype_of_servers(config.model)]
    command += ["--context-length", str(config.environment.max_tokens + SPARE_TOKENS)]
    command += ["--tensor-parallel-size", str(engine.tensor_parallel)]
    command += ["--sampling-defaults", "openai"]  # none from the model's generation_config.json
    if config.model.device == "cpu":
        command += ["--device", "cpu"]
    elif engine.offload:
        command += ["--enable-memory-saver", "--mem-fraction-static", _SHARED_MEMORY]
    return [*command, *engine.arguments]


def sglang_environment(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without settings that would change turns or open another port."""
    kept = {**environment}
    for name in ("SGLANG_GRPC_PORT", "SGLANG_MAX_NEW_TOKENS_LIMIT"):
        kept.pop(name, None)
    return kept | {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probabilities after temperature
        # The spare tokens may exceed the model's context; no turn reaches them.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Otherwise /health samples a token, which waits while an update pauses the server.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }

"""The arguments and environment of the vLLM servers that a run starts (``server_start.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forage.config.run_config import RunConfig
from forage.config.server_config import VllmPlacement
from forage.config.shipped_recipes import shipped

_BATCHED_TOKENS = 8192
_MAX_LOGPROBS = 20  # vLLM's default maximum; one is the sampled token's
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM supports


def vllm_command(config: RunConfig, engine: VllmPlacement, program: Path) -> list[str]:
    """The ``vllm serve`` command that engine and receiver need, without host and port."""
    longest = config.environment.max_tokens
    command = [str(program), "serve", config.model.path, "--served-model-name", "policy"]
    dtype = config.placement.dtype_of_servers(config.model)
    command += ["--dtype", dtype, "--max-model-len", str(longest)]
    command += ["--tensor-parallel-size", str(engine.tensor_parallel)]
    # A route for token ids, log-probabilities after temperature, and no defaults from the model.
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--generation-config", "vllm"]
    command += ["--worker-extension-cls", "forage_receiver.Receiver"]
    command += ["--weight-transfer-config", '{"backend": "forage"}']
    if (num_logprobs := config.rollout.num_alternatives + 1) > _MAX_LOGPROBS:
        command += ["--max-logprobs", str(num_logprobs)]
    if engine.transfer == "adapters":
        assert config.model.lora is not None, "the run's settings were checked"
        rank = next(rank for rank in _LORA_RANKS if rank >= config.model.lora.rank)
        command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
    if config.model.device != "cpu" and engine.offload:
        command.append("--enable-sleep-mode")
    if config.model.device == "cpu":
        # On a CPU, seeded sampling crashes the engine after a chunked prefill or a preemption.
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", str(max(_BATCHED_TOKENS, longest))]
    return [*command, *engine.arguments]


def vllm_environment(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` plus the receiver's folder, and the flags of its routes."""
    fixed = {"PYTHONPATH": str(shipped("plugins"))}
    fixed |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    engine = config.placement.engine
    if engine.kind == "vllm" and engine.transfer == "adapters":
        fixed["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.model.device != "cpu":
        return {**environment, **fixed}
    # Do not bind threads to cores: all servers would be bound to the same ones.
    fixed["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    # Run the model in the scheduler's process: two processes would spin in turn.
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {**usual, **environment, **fixed}

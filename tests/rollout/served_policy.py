"""A real vLLM server with weights that a test changes, and their policy's log-probabilities."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from forage.config.model_config import ModelConfig
from forage.rollout.engines.servers.served_engine import ServedEngine
from forage.rollout.engines.servers.server_pool import ServerPool
from forage.rollout.engines.servers.vllm_server import VllmServer
from forage.rollout.engines.servers.weight_sender import WeightSender
from forage.rollout.engines.servers.weight_transports import (
    GroupTransport,
)
from forage.rollout.engines.servers.weight_update import ServerUpdates
from forage.training.model import load_tokenizer, weights_by_name
from forage.types import Completion, Sampling
from tests.rollout.tiny_models import change_weights
from tests.tiny_runs import random_model
from tests.vllm_server import real_server

CPU = torch.device("cpu")
PROMPT = list(range(20, 60))


def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelConfig(path=str(random_model())))


def ask(key: str = "0/q/0", **changes: Any) -> Sampling:
    fields: dict[str, Any] = {
        "max_tokens": 24,
        "stop": (),
        "stop_ids": (0,),
        "episode_key": key,
        "seed": 7,
    }
    return Sampling(**{**fields, **changes})


class Served:
    """The real server with the weights of ``model``, which ``change`` modifies."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(random_model())
        self.server = VllmServer(real_server(), 120.0, timeout_s, 64)
        self.pool = ServerPool([self.server], 60.0)
        self.engine = ServedEngine(self.pool)
        self.sender = WeightSender(lambda: weights_by_name(self.model), CPU)
        self.transport = GroupTransport(self.sender, timeout_s)
        self.updates = ServerUpdates(self.pool, self.transport, recomputes=True)
        self.version = 0
        self.models: dict[int, PreTrainedModel] = {}

    def change(self, scale: float = 0.3) -> None:
        """Changes the weights so much that each token matters; keeps the old ones by version."""
        change_weights(self.model, self.version, scale)
        self.version += 1

    async def publish(self) -> None:
        async with self.updates.updating(lambda: self.version):
            pass
        copy = AutoModelForCausalLM.from_config(self.model.config)
        copy.load_state_dict(self.model.state_dict())
        self.models[self.version] = copy.eval()

    def logprobs(
        self, prompt: Sequence[int], completion: Completion, temperature: float = 1.0
    ) -> Tensor:
        """The log-probabilities of the sampled tokens under the last version's policy."""
        return logprobs_of(self.model, prompt, completion.token_ids_T, temperature)


def logprobs_of(
    model: PreTrainedModel, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0].double() / temperature
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(
        1, torch.tensor(sampled)[:, None]
    )[:, 0]


def difference(completion: Completion, expected: Tensor) -> float:
    return (torch.tensor(completion.logprobs_T).double() - expected).abs().max().item()


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    """A server with its first, changed weights published."""
    it = Served(**settings)
    it.change()
    await it.publish()
    try:
        yield it
    finally:
        await it.engine.close()


async def in_flight(engine: ServedEngine, server: VllmServer, key: str) -> asyncio.Task[Completion]:
    """A long turn that the server is sampling at this moment; one that has ended is restarted."""
    while True:
        sampling = ask(key, max_tokens=300, stop_ids=())
        turn = asyncio.create_task(engine.generate(PROMPT, sampling))
        while not turn.done():
            if await metric(server, "vllm:num_requests_running"):
                return turn
            await asyncio.sleep(0.01)
        await turn


async def metric(server: VllmServer, name: str) -> float:
    """The sum of a metric over its labels."""
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

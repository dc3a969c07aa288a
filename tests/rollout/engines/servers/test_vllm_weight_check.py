"""With a real vLLM server: its results after updates are compared with the trainer's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from forage.errors import UserError
from forage.rollout.engines.servers.server_pool import ServerPool
from forage.rollout.engines.servers.vllm_server import VllmServer
from forage.rollout.engines.servers.weight_check import WeightCheck, tokens_of_text
from forage.rollout.engines.servers.weight_sender import WeightSender
from forage.rollout.engines.servers.weight_transports import DiskTransport, GroupTransport
from forage.rollout.engines.servers.weight_update import ServerUpdates
from forage.training.checkpoints.saved_weights import write_merged
from forage.training.model import save_model, weights_by_name
from tests.rollout.folder_models import logprobs_by
from tests.rollout.served_policy import CPU, tokenizer
from tests.rollout.tiny_models import change_weights
from tests.tiny_runs import MAX_TOKENS, random_model, scratch
from tests.vllm_server import needs_vllm, real_server

pytestmark = needs_vllm
BOUND = 1e-4


@cache
def mixture() -> Path:
    """A Qwen3-MoE of two layers; its experts are padded, since 48 is not a multiple of 32."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        **{"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, initializer_range=0.1))
    save_model(model.eval(), tokenizer(), scratch() / "mixture")
    return scratch() / "mixture"


class Compared:
    """A server, and a model whose weights it gets; ``values`` are the check's expectations."""

    def __init__(self, path: Path, url: str, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager"
        )
        self.pool = ServerPool([VllmServer(url, 120.0, 60.0, 8)], 60.0)
        self.check = WeightCheck(
            tokens_of_text(tokenizer(), MAX_TOKENS), partial(logprobs_by, self.model), BOUND
        )
        sender = WeightSender(lambda: weights_by_name(self.model), CPU)
        ways = (
            GroupTransport(sender, 60.0),
            DiskTransport(partial(write_merged, self.model), folder),
        )
        self.ways = [ServerUpdates(self.pool, way, True, check=self.check) for way in ways]
        self.version = 0

    async def publish(self, updates: ServerUpdates) -> None:
        self.version += 1
        change_weights(self.model, self.version, 0.1)
        async with updates.updating(lambda: self.version):
            pass


@asynccontextmanager
async def compared(path: Path, url: str, folder: Path) -> AsyncIterator[Compared]:
    it = Compared(path, url, folder)
    try:
        yield it
    finally:
        await it.pool.members[0].server.close()


@pytest.mark.parametrize("kind", ["dense", "mixture"])
async def test_a_server_computes_what_transformers_computes_after_each_update(
    tmp_path: Path, kind: str
):
    """Each update scrambled the experts of a mixture: off by a nat, and the run continued."""
    path = random_model() if kind == "dense" else mixture()
    url = real_server() if kind == "dense" else real_server(model=str(mixture()))
    async with compared(path, url, tmp_path) as it:
        for updates in (it.ways[0], it.ways[0], it.ways[1], it.ways[1]):
            await it.publish(updates)
            assert [member.server.url for member in it.pool.serving] == [url]
            assert it.check.wrong == set()


async def test_a_server_that_keeps_older_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The update changed its version but none of its weights, and it was trusted."""
    async with compared(random_model(), real_server(), tmp_path) as it:
        await it.publish(it.ways[0])

        async def send_nothing(*_: object) -> None:
            await it.pool.members[0].server.start_update()
            await it.pool.members[0].server.finish_update(str(it.version))

        monkeypatch.setattr(it.ways[0]._transport, "bring", send_nothing)
        with pytest.raises(UserError, match="no server samples with the trainer's weights"):
            await it.publish(it.ways[0])

"""The way of new weights from the trainer to the engine, under a new policy version.

In one process the engine samples with the trainer's own tensors: nothing travels, and only the
version moves. Gradients are computed while the engine samples on; from the first change of a weight
until the new version is out it samples nothing. Servers have copies (``weight_update.py``): they
sample on while weights change, and stop while they take them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from functools import partial
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forage.cluster.model_servers import ServerHost, open_servers
from forage.config.run_config import RunConfig
from forage.rollout.engines.engine import Engine
from forage.rollout.engines.open_engine import open_engine
from forage.rollout.engines.served_engine import ServedEngine
from forage.rollout.engines.torch.torch_engine import TorchEngine
from forage.rollout.engines.weight_transports import DiskTransport, GroupTransport, load_adapters
from forage.rollout.engines.weight_update import ServerUpdates
from forage.training.lora import has_adapters, save_adapters
from forage.training.model import weights_by_name, write_weights
from forage.training.trainer_ranks import AnyTrainer


class Updated(Protocol):
    """What is updated: the engine in this process, or the servers behind the engine."""

    def updating(self, version: Callable[[], int]) -> AbstractAsyncContextManager[None]:
        """A context in which the weights may change: no token is sampled until it ends.

        ``version`` is asked at its end: it gives the policy version of the tokens that follow,
        also of those that go on with a turn begun before.
        """
        ...


class Publisher(AbstractContextManager[None]):
    """Brings the trainer's weights to the engine; ``with`` it, on any thread, to change them.

    Such a change begins an update of the engine, which lasts until ``publish``.
    """

    def __init__(self, engine: Updated, trainer: AnyTrainer) -> None:
        """Made on the event loop that the engine is used on."""
        self._engine = engine
        self._trainer = trainer
        self._loop = asyncio.get_running_loop()
        self._update: AsyncExitStack | None = None

    async def begin(self) -> None:
        """The engine lets go of the weights, if it has not yet."""
        if self._update is None:
            update = AsyncExitStack()
            await update.enter_async_context(self._engine.updating(lambda: self._trainer.version))
            self._update = update

    async def publish(self) -> None:
        """From now on turns are sampled with the weights as they are, under their version."""
        await self.begin()
        assert self._update is not None, "it has just begun"
        update, self._update = self._update, None
        await update.aclose()

    def __enter__(self) -> None:
        asyncio.run_coroutine_threadsafe(self.begin(), self._loop).result()

    def __exit__(self, *_: object) -> None:
        """The engine waits on: more weights may change before the version is out."""


@asynccontextmanager
async def open_sampling(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    hosts: Callable[[], Sequence[ServerHost]],
) -> AsyncIterator[tuple[Engine, Updated]]:
    """The engine of a run, with its servers at ``hosts``, and what brings it weights.

    Raises ``UserError`` where a server cannot be started.
    """
    async with (
        open_servers(config, hosts) as servers,
        open_engine(config, tokenizer, model, servers) as engine,
        open_updates(config, engine, model) as updated,
    ):
        yield engine, updated


@asynccontextmanager
async def open_updates(
    config: RunConfig, engine: Engine, model: PreTrainedModel
) -> AsyncIterator[Updated]:
    """What brings the weights of ``model`` to the engine; servers that come late get them, too."""
    settings = config.placement.engine
    if isinstance(engine, TorchEngine):
        yield engine
        return
    assert isinstance(engine, ServedEngine), "weights behind model.endpoint cannot be replaced"
    assert settings.kind != "torch", "servers are named in placement.engine"
    weights = partial(weights_by_name, model)
    folder = config.output_dir / "published"
    if settings.kind == "vllm" and settings.transfer == "group":
        # Ranks leave their GPUs to themselves: a copy in host memory travels over gloo.
        transport = GroupTransport(weights, model.device, settings.update_timeout_s)
    elif settings.kind == "vllm" and settings.transfer == "adapters" and has_adapters(model):
        transport = DiskTransport(partial(save_adapters, model), folder, load_adapters)
    else:
        transport = DiskTransport(partial(write_weights, model), folder)
    recomputes = settings.cache_on_update == "recompute"
    updates = ServerUpdates(engine.pool, transport, recomputes, sleeps=settings.offload)
    async with updates.looking_after():
        yield updates

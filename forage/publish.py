"""The way of new weights from the trainer to the engine, under a new policy version.

In one process the engine samples with the trainer's own tensors: nothing travels, and only the
version moves. Gradients are computed while the engine samples on; from the first change of a weight
until the new version is out it samples nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, AsyncExitStack

from forage.rollout.engines.engine import Engine
from forage.training.trainer import Trainer


class Publisher(AbstractContextManager[None]):
    """Brings the trainer's weights to the engine; ``with`` it, on any thread, to change them.

    Such a change begins an update of the engine, which lasts until ``publish``.
    """

    def __init__(self, engine: Engine, trainer: Trainer) -> None:
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

"""The in-process engine: one copy of the weights shared with the trainer, continuous batching.

This is its face towards the event loop; ``EngineThread`` owns the slots and advances the turns. An
episode keeps its slot, keys and values between its turns; the prompt of a group is computed once
and copied. Requests beyond the slots wait in order. Which episodes run is decided in ``play/``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import torch
from transformers import PreTrainedModel

from forage.config.rollout_config import EngineConfig
from forage.models import attention
from forage.rollout.engines.engine import EngineCounters
from forage.rollout.engines.torch.cache_shape import cache_shape
from forage.rollout.engines.torch.engine_check import EngineCheck
from forage.rollout.engines.torch.engine_thread import EngineThread
from forage.rollout.engines.torch.sampling import noise_key
from forage.rollout.engines.torch.slots import PendingTurn, SlotCache, round_up, settle
from forage.rollout.engines.torch.stopping import StopTable
from forage.types import Completion, EngineError, Sampling


class TorchEngine:
    """Samples turns with a transformers model in this process; see the module for how."""

    def __init__(
        self,
        model: PreTrainedModel,
        stop_table: StopTable,
        config: EngineConfig,
        max_tokens: int,
        num_threads: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``max_tokens`` bounds an episode; ``num_threads`` None measures.

        ``dtype`` is what the model multiplies in, and so that of keys and values: None is that of
        its weights.
        """
        attention.install(model)
        self._model = model
        self._max_tokens = max_tokens
        self._asking: set[str] = set()
        parameter = next(model.parameters())
        cache = SlotCache(
            cache_shape(model),
            round_up(config.num_slots, config.tile_rows),
            max_tokens + config.prefill_bucket,
            dtype or parameter.dtype,
            parameter.device,
        )
        self._worker = EngineThread(model, cache, stop_table, config, num_threads)

    @property
    def counters(self) -> EngineCounters:
        return self._worker.counters

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one turn; raises ``EngineError`` if it cannot fit or the engine is closed."""
        if len(token_ids) + sampling.max_tokens > self._max_tokens:
            raise EngineError(
                f"{len(token_ids)} tokens and a turn of {sampling.max_tokens} exceed the "
                f"engine's {self._max_tokens}; raise environment.max_tokens"
            )
        episode_key = sampling.episode_key
        assert episode_key not in self._asking, f"two turns of the episode {episode_key} at once"
        self._raise_if_stopped()
        loop = asyncio.get_running_loop()
        key = noise_key(sampling.seed, episode_key)
        turn = PendingTurn(tuple(token_ids), sampling, loop, loop.create_future(), key)
        self._worker.put(lambda: self._worker.enqueue(turn))
        self._raise_if_stopped()  # once more: what is in line when the worker ends is ended there
        self._asking.add(episode_key)
        try:
            return await turn.future
        except asyncio.CancelledError:
            self.release(episode_key)
            raise
        finally:
            self._asking.discard(episode_key)

    async def check(self) -> None:
        """Raise ``UserError`` if turns are not computed as transformers computes them."""
        await self._run(lambda: None)  # the worker's first passes must not meet another attention
        check = EngineCheck(self._model)
        await self._run(lambda: self._worker.check(check))

    def release(self, episode_key: str) -> None:
        """Free the episode's slot and drop whatever of it still waits."""
        self._worker.put(lambda: self._worker.release(episode_key))

    @asynccontextmanager
    async def updating(self, version: Callable[[], int]) -> AsyncIterator[None]:
        """See ``Engine``; keys and values of the older weights are computed anew afterwards.

        Where an error ends the context nothing is sampled any more: the weights may be half new.
        """
        await self._run(self._worker.hold)
        yield
        number = version()
        await self._run(lambda: self._worker.take_version(number))

    async def close(self) -> None:
        """Stop the worker; turns in flight end with ``EngineError``."""
        if self._worker.thread.is_alive():
            self._worker.put(self._worker.shut)
            await asyncio.to_thread(self._worker.thread.join)

    async def _run(self, command: Callable[[], None]) -> None:
        """Wait until the worker has run a command between two of its rounds."""
        self._raise_if_stopped()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            try:
                command()
            except BaseException as error:  # a bug: it ends the worker, and who waits is told
                loop.call_soon_threadsafe(settle, done, error)
                raise
            loop.call_soon_threadsafe(settle, done, None)

        self._worker.put(run)
        self._raise_if_stopped()
        await done

    def _raise_if_stopped(self) -> None:
        if self._worker.crash is not None:
            raise self._worker.crash
        if self._worker.is_closed:
            raise EngineError("the engine is closed")

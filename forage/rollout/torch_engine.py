"""The in-process engine: one copy of the weights shared with the trainer, continuous batching.

A worker thread owns the slots. Each of its rounds prefills what arrived, then decodes one token
for every row that wants one, tile by tile. An episode keeps its slot, keys and values between its
turns; the prompt of a group is computed once and copied. Requests beyond the slots wait in order.
It schedules nothing else: which episodes run is ``scheduler.py``'s business.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forage import attention
from forage.config import EngineConfig
from forage.hardware import choose_num_threads
from forage.rollout.engine import EngineCounters
from forage.rollout.sampling import choose_tokens, noise_key, uniform_noise
from forage.rollout.slots import CacheShape, DecodeAttend, PrefillAttend, SlotCache
from forage.rollout.stopping import StopTable
from forage.types import Completion, EngineError, FinishReason, Sampling

NUM_PROMPTS_KEPT = 32


@dataclass(slots=True)
class _Turn:
    """A turn being sampled, and the future that waits for it."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    key: int
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    """An episode's place: the tokens it is made of and how many of them have keys and values."""

    index: int
    episode_key: str | None = None
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    turn: _Turn | None = None


class WeightsLock:
    """Keeps the engine from the weights while they change, and until the change has a version."""

    def __init__(self) -> None:
        self.reading = threading.Lock()
        self.is_version_due = False

    def __enter__(self) -> None:
        self.reading.acquire()

    def __exit__(self, *_: object) -> None:
        self.is_version_due = True
        self.reading.release()


class TorchEngine:
    """Samples turns with a transformers model in this process; see the module for how."""

    def __init__(
        self,
        model: PreTrainedModel,
        stop_table: StopTable,
        config: EngineConfig,
        max_tokens: int,
        num_threads: int | None = None,
    ) -> None:
        """``max_tokens`` bounds an episode; ``num_threads`` None measures."""
        attention.install(model)
        self.weights_lock = WeightsLock()
        """Hold it to change the weights; then tell ``receive_weights`` what they are."""
        self._model = model
        self._stop_table = stop_table
        self._config = config
        self._max_tokens = max_tokens
        self._num_threads = num_threads
        parameter = next(model.parameters())
        self._device = parameter.device
        self._num_slots = -(-config.num_slots // config.tile_rows) * config.tile_rows
        capacity = max_tokens + config.prefill_bucket
        self._cache = SlotCache(
            _cache_shape(model), self._num_slots, capacity, parameter.dtype, self._device
        )
        self._slots = [_Slot(index) for index in range(self._num_slots)]
        self._slot_of: dict[str, _Slot] = {}
        self._asking: set[str] = set()
        self._waiting: deque[_Turn] = deque()
        self._prompts: OrderedDict[tuple[int, ...], tuple[list[tuple[Tensor, Tensor]], Tensor]]
        self._prompts = OrderedDict()
        self._version = 0
        self._counters = EngineCounters()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closed = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="forage-engine", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> EngineCounters:
        return self._counters

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
        turn = _Turn(tuple(token_ids), sampling, loop, loop.create_future(), key)
        self._commands.put(lambda: self._waiting.append(turn))
        self._raise_if_stopped()  # once more: what is in line when the worker ends is ended there
        self._asking.add(episode_key)
        try:
            return await turn.future
        except asyncio.CancelledError:
            self.release(episode_key)
            raise
        finally:
            self._asking.discard(episode_key)

    def release(self, episode_key: str) -> None:
        """Free the episode's slot and drop whatever of it still waits."""
        self._commands.put(lambda: self._release(episode_key))

    async def receive_weights(self, version: int) -> None:
        """The shared weights are now ``version``: keys and values of older ones are recomputed."""
        self._raise_if_stopped()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def apply() -> None:
            self._version = version
            self.weights_lock.is_version_due = False
            self._prompts.clear()
            for slot in self._slots:
                slot.num_cached = 0
            loop.call_soon_threadsafe(_resolve, done, None)

        self._commands.put(apply)
        self._raise_if_stopped()
        await done

    async def close(self) -> None:
        """Stop the worker; turns in flight end with ``EngineError``."""
        if self._thread.is_alive():
            self._commands.put(self._shut)
            await asyncio.to_thread(self._thread.join)

    def _raise_if_stopped(self) -> None:
        if self._crash is not None:
            raise self._crash
        if self._is_closed:
            raise EngineError("the engine is closed")

    # Everything below runs in the worker thread.

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                with self.weights_lock.reading:
                    self._choose_threads()
                while not self._is_closed:
                    self._take_commands()
                    with self.weights_lock.reading:
                        if not self.weights_lock.is_version_due:
                            self._admit()
                            self._prefill()
                            self._decode()
        except BaseException as error:  # a bug: every caller must see it, whatever it is
            self._crash = error
        self._fail_all(self._crash or EngineError("the engine was closed while this turn waited"))

    def _choose_threads(self) -> None:
        """The given number of torch threads for this thread, or the fastest for a decode step."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
            return
        rows = self._config.tile_rows
        positions_R = torch.full((rows,), self._max_tokens // 2, device=self._device)
        token_ids_R1 = torch.zeros(rows, 1, dtype=torch.long)

        def decode_once() -> Tensor:
            attend = DecodeAttend(self._cache, slice(0, rows), positions_R)
            return self._forward(token_ids_R1, positions_R[:, None], attend)

        choose_num_threads(decode_once)

    def _take_commands(self) -> None:
        while not self._is_closed:
            try:
                command = self._commands.get(block=self._must_wait())
            except queue.Empty:
                return
            command()

    def _must_wait(self) -> bool:
        """Whether only a command can change what there is to do: a turn, a release, a version."""
        is_sampling = any(slot.turn is not None for slot in self._slots)
        can_start = is_sampling or any(self._can_admit(turn) for turn in self._waiting)
        return self.weights_lock.is_version_due or not can_start

    def _shut(self) -> None:
        self._is_closed = True

    def _fail_all(self, error: BaseException) -> None:
        """End every turn, those still in line as well."""
        while not self._commands.empty():
            self._commands.get()()
        turns = [*self._waiting, *(slot.turn for slot in self._slots if slot.turn)]
        self._waiting.clear()
        for turn in turns:
            turn.loop.call_soon_threadsafe(_reject, turn.future, error)

    def _release(self, episode_key: str) -> None:
        self._waiting = deque(
            turn for turn in self._waiting if turn.sampling.episode_key != episode_key
        )
        slot = self._slot_of.pop(episode_key, None)
        if slot is not None:
            slot.episode_key, slot.turn = None, None
            slot.token_ids, slot.num_cached = [], 0

    def _can_admit(self, turn: _Turn) -> bool:
        return turn.sampling.episode_key in self._slot_of or len(self._slot_of) < self._num_slots

    def _admit(self) -> None:
        """Give waiting turns their slots, in order of arrival."""
        kept: deque[_Turn] = deque()
        while self._waiting:
            turn = self._waiting.popleft()
            if not self._can_admit(turn):
                kept.append(turn)
                continue
            key = turn.sampling.episode_key
            slot = self._slot_of.get(key)
            if slot is None:
                # The lowest free slot keeps the tiles in use few.
                slot = next(slot for slot in self._slots if slot.episode_key is None)
                slot.episode_key = key
                self._slot_of[key] = slot
            self._continue(slot, turn)
        self._waiting = kept

    def _continue(self, slot: _Slot, turn: _Turn) -> None:
        seen = slot.token_ids
        if tuple(seen) != turn.token_ids[: len(seen)]:
            self._count(transcript_violations=1)
            slot.num_cached = 0
        self._count(reused_tokens=slot.num_cached)
        slot.token_ids = list(turn.token_ids)
        slot.turn = turn

    def _prefill(self) -> None:
        """Compute keys and values of every new stretch, and sample the token after it."""
        for slot in self._slots:
            if slot.turn is not None and len(slot.token_ids) - slot.num_cached > 1:
                hidden_1H = self._prefill_slot(slot)
                self._sample([slot], self._logits(hidden_1H))

    def _prefill_slot(self, slot: _Slot) -> Tensor:
        start, end = slot.num_cached, len(slot.token_ids)
        prompt = tuple(slot.token_ids) if start == 0 else None
        if prompt is not None and prompt in self._prompts:
            layers, hidden_1H = self._prompts[prompt]
            self._cache.copy_in(slot.index, layers)
            self._count(reused_tokens=end)
        else:
            hidden_1H = self._forward_stretch(slot, start, end)
            self._count(prefilled_tokens=end - start)
            if prompt is not None:
                self._prompts[prompt] = (self._cache.copy_out(slot.index, end), hidden_1H)
                if len(self._prompts) > NUM_PROMPTS_KEPT:
                    self._prompts.popitem(last=False)
        slot.num_cached = end
        return hidden_1H

    def _forward_stretch(self, slot: _Slot, start: int, end: int) -> Tensor:
        bucket = self._config.prefill_bucket
        num_tokens = -(-(end - start) // bucket) * bucket
        token_ids = torch.zeros(1, num_tokens, dtype=torch.long)
        token_ids[0, : end - start] = torch.tensor(slot.token_ids[start:end])
        positions = torch.arange(start, start + num_tokens)[None]
        attend = PrefillAttend(self._cache, slot.index, start, num_tokens)
        hidden = self._forward(token_ids, positions, attend)
        return hidden[0, end - start - 1][None]

    def _decode(self) -> None:
        """One more token for each row that has a turn, a tile at a time."""
        rows = self._config.tile_rows
        for first in range(0, self._num_slots, rows):
            active = [slot for slot in self._slots[first : first + rows] if slot.turn is not None]
            if active:
                self._decode_tile(first, active)

    def _decode_tile(self, first: int, active: list[_Slot]) -> None:
        rows = self._config.tile_rows
        token_ids_R1 = torch.zeros(rows, 1, dtype=torch.long)
        positions_R = torch.full((rows,), self._cache.scratch)
        for slot in active:
            row = slot.index - first
            token_ids_R1[row, 0] = slot.token_ids[-1]
            positions_R[row] = slot.num_cached
            slot.num_cached += 1
        positions_R = positions_R.to(self._device)
        attend = DecodeAttend(self._cache, slice(first, first + rows), positions_R)
        # A row that does not decode stands at the scratch position, which may lie past the
        # model's last; rotary embeddings are computed from the number, so that does no harm.
        hidden_R1H = self._forward(token_ids_R1, positions_R[:, None], attend)
        logits_RV = self._logits(hidden_R1H[:, 0])
        self._count(decode_steps=1)
        rows_of_active = torch.tensor([slot.index - first for slot in active])
        self._sample(active, logits_RV[rows_of_active.to(self._device)])

    def _forward(self, token_ids: Tensor, positions: Tensor, attend: attention.Attend) -> Tensor:
        output = self._model.base_model(
            input_ids=token_ids.to(self._device),
            position_ids=positions.to(self._device),
            use_cache=False,
            attend=attend,
        )
        return output.last_hidden_state

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        head = self._model.get_output_embeddings()
        assert head is not None, "a causal language model has a head"
        return head(hidden_BH)

    def _sample(self, slots: list[_Slot], logits_BV: Tensor) -> None:
        turns = [slot.turn for slot in slots if slot.turn is not None]
        keys = np.array([turn.key for turn in turns], dtype=np.uint64)
        positions = np.array([len(slot.token_ids) for slot in slots], dtype=np.uint64)
        noise = torch.from_numpy(uniform_noise(keys, positions))
        temperature = torch.tensor([turn.sampling.temperature for turn in turns])
        top_p = torch.tensor([turn.sampling.top_p for turn in turns])
        tokens, logprobs = choose_tokens(
            logits_BV,
            noise.to(self._device),
            temperature.to(self._device),
            top_p.to(self._device),
        )
        self._count(sampled_tokens=len(turns))
        for slot, turn, token, logprob in zip(
            slots, turns, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            slot.token_ids.append(token)
            turn.sampled.append(token)
            turn.logprobs.append(logprob)
            turn.versions.append(self._version)
            self._finish_if_done(slot, turn)

    def _finish_if_done(self, slot: _Slot, turn: _Turn) -> None:
        sampling = turn.sampling
        is_stopped = turn.sampled[-1] in sampling.stop_ids or self._stop_table.completes(
            turn.sampled, sampling.stop
        )
        if not is_stopped and len(turn.sampled) < sampling.max_tokens:
            return
        slot.turn = None
        completion = Completion(
            tuple(turn.sampled),
            tuple(turn.logprobs),
            tuple(turn.versions),
            FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        )
        turn.loop.call_soon_threadsafe(_resolve, turn.future, completion)

    def _count(self, **more: int) -> None:
        counters = self._counters
        self._counters = replace(
            counters, **{name: getattr(counters, name) + by for name, by in more.items()}
        )


def _cache_shape(model: PreTrainedModel) -> CacheShape:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return CacheShape(config.num_hidden_layers, config.num_key_value_heads, head_dim)


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

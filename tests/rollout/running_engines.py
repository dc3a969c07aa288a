"""An engine over a tiny random model, and episodes played on it by hand, turn by turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from forage.config.placement_config import TorchPlacement
from forage.rollout.engines.torch.stopping import StopTable
from forage.rollout.engines.torch.torch_engine import TorchEngine
from forage.types import Completion, Sampling
from tests.rollout.tiny_models import VOCABULARY, make_model

MAX_TOKENS = 1024
LETTERS = StopTable([chr(33 + index).encode() for index in range(VOCABULARY - 2)])


@asynccontextmanager
async def running_engine(
    model: PreTrainedModel | None = None,
    num_slots: int = 8,
    tile_rows: int = 4,
    prefill_bucket: int = 16,
    max_tokens: int = MAX_TOKENS,
    max_draft_tokens: int = 7,
    cache_on_update: Literal["recompute", "keep"] = "recompute",
    num_threads: int = 1,
) -> AsyncIterator[TorchEngine]:
    """An engine that is closed at the end, whatever happens."""
    settings = TorchPlacement(
        num_slots=num_slots,
        tile_rows=tile_rows,
        prefill_bucket=prefill_bucket,
        max_draft_tokens=max_draft_tokens,
        cache_on_update=cache_on_update,
    )
    engine = TorchEngine(model or make_model(), LETTERS, settings, max_tokens, num_threads)
    try:
        yield engine
    finally:
        await engine.close()


async def publish(engine: TorchEngine, version: int) -> None:
    """Gives the engine's current weights this version."""
    async with engine.updating(lambda: version):
        pass


def sampling(
    key: str = "0/q/0",
    max_tokens: int = 8,
    temperature: float = 1.0,
    stop: tuple[str, ...] = (),
    stop_ids: tuple[int, ...] = (),
    seed: int = 7,
) -> Sampling:
    return Sampling(max_tokens, stop, stop_ids, key, seed, temperature)


def tokens(start: int, count: int) -> tuple[int, ...]:
    """``count`` different-looking token ids."""
    return tuple((start * 31 + index * 17 + index * index) % VOCABULARY for index in range(count))


@dataclass(frozen=True)
class Plan:
    """An episode by number: its prompt's length, then each turn's length and
    observation's length.
    """

    key: str = "0/q/0"
    num_prompt: int = 11
    turns: tuple[tuple[int, int], ...] = ((6, 9), (1, 20), (5, 0))
    temperature: float = 1.0


@dataclass(frozen=True)
class Played:
    """The whole transcript, and the completions with the positions where they begin."""

    token_ids: tuple[int, ...]
    completions: tuple[tuple[int, Completion], ...]


async def play(
    engine: TorchEngine, plan: Plan, release: bool = True, token_ids: Sequence[int] = ()
) -> Played:
    """Plays a plan to its end (``token_ids`` replaces its prompt)."""
    transcript = list(token_ids or tokens(1, plan.num_prompt))
    completions: list[tuple[int, Completion]] = []
    for index, (num_sampled, num_observed) in enumerate(plan.turns):
        turn = sampling(plan.key, num_sampled, plan.temperature)
        completion = await engine.generate(transcript, turn)
        completions.append((len(transcript), completion))
        transcript += completion.token_ids_T
        transcript += tokens(40 + index, num_observed)
    if release:
        engine.release(plan.key)
    return Played(tuple(transcript), tuple(completions))

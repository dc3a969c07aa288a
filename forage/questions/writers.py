"""Who writes and reads questions: a chat endpoint (``endpoint_writer.py``) or a local model.

A writer answers one prompt with one text; callers run many at a time. Here are the protocol, its
failures, and the writer that samples a model in this process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forage.errors import UserError
from forage.questions.question_prompts import PASSAGE_TAG, Prompt
from forage.remote.openai_replies import Usage

if TYPE_CHECKING:
    from forage.environment.codec import Codec
    from forage.types import Generate

MAX_REPLY_TOKENS = 256
_MAX_TOKENS = 4096


class WriterRefused(Exception):
    """The writer gave no reply to one prompt; the others are not affected."""


class CostReached(Exception):
    """The next request could exceed ``--max-cost``."""


@dataclass(frozen=True, slots=True)
class Written:
    """A reply, and the tokens it took."""

    text: str
    usage: Usage


class Writer(Protocol):
    """A model that answers prompts; ``name`` identifies it in the journal."""

    name: str

    async def write(self, prompt: Prompt, key: str, temperature: float) -> Written:
        """``key`` is unique to the request: with the run's seed it decides what is sampled.

        Raises ``WriterRefused``, ``CostReached``, or ``UserError`` if no prompt can succeed."""
        ...

    def cost(self, usage: Usage) -> float | None:
        """The price of these tokens; None if no price is known."""
        ...


class ModelWriter:
    """Samples a model in this process through its chat format, if it has one."""

    def __init__(
        self, name: str, engine: Generate, codec: Codec, seed: int, max_tokens: int = _MAX_TOKENS
    ) -> None:
        self.name = name
        self._engine = engine
        self._codec = codec
        self._seed = seed
        self._max_tokens = max_tokens

    async def write(self, prompt: Prompt, key: str, temperature: float) -> Written:
        from forage.environment.prompt import fill
        from forage.types import EngineError, Sampling

        ids = fill(prompt.template, prompt.fillings, self._codec)
        if len(ids) + MAX_REPLY_TOKENS > self._max_tokens:
            raise WriterRefused(f"a prompt of {len(ids)} tokens is too long")
        # A model without a chat format continues the text: an empty line ends its reply.
        stop = () if self._codec.tokenizer.chat_template else ("\n\n",)
        noise = (key, self._seed)
        sampling = Sampling(MAX_REPLY_TOKENS, stop, self._codec.eos_ids, *noise, temperature)
        try:
            completion = await self._engine.generate(ids, sampling)
        except EngineError as error:
            raise WriterRefused(str(error)) from error
        finally:
            self._engine.release(key)
        kept = [i for i in completion.token_ids_T if not self._codec.is_added(i)]
        usage = Usage(len(ids), 0, len(completion.token_ids_T), 0)
        return Written(self._codec.decode(kept), usage)

    def cost(self, usage: Usage) -> float | None:
        return None


@asynccontextmanager
async def open_model_writer(path: Path, seed: int) -> AsyncIterator[ModelWriter]:
    """Loads a Hugging Face directory; raises ``UserError``."""
    from forage.config.model_config import ModelConfig
    from forage.config.placement_config import TorchPlacement
    from forage.environment.codec import Codec
    from forage.hardware import has_gpu
    from forage.rollout.engines.torch.stopping import StopTable
    from forage.rollout.engines.torch.torch_engine import TorchEngine
    from forage.training.model import load_sampled, load_tokenizer

    if path.suffix == ".gguf":
        raise UserError(
            f"{path} is a GGUF file; convert it with: forage import-gguf {path} --out {path.stem}"
        )
    config = ModelConfig(path=str(path), device="cuda" if has_gpu() else "cpu")
    tokenizer = load_tokenizer(config, "--model")
    model = load_sampled(config)
    assert model is not None, "a model without an endpoint is loaded"
    limit = getattr(model.config, "max_position_embeddings", None) or _MAX_TOKENS
    if limit < 2 * MAX_REPLY_TOKENS:
        raise UserError(
            f"--model {path} reads {limit} tokens; name a model that reads 1,000 or more"
        )
    slots = TorchPlacement(num_slots=32, tile_rows=16)
    limit = min(limit, _MAX_TOKENS)
    engine = TorchEngine(model, StopTable.of(tokenizer), slots, limit)
    try:
        await engine.check()
        yield ModelWriter(str(path), engine, Codec(tokenizer, (PASSAGE_TAG,)), seed, limit)
    finally:
        await engine.close()

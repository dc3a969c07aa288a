"""The engine of an evaluation: the model in this process, or the server of ``model.endpoint``.

``forage eval`` and ``forage play`` open it here, and ask here for the tokenizer that fits it.
Training makes its own engine, around the weights that it changes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forage.config.endpoint_config import EndpointConfig
from forage.config.run_config import RunConfig
from forage.environment.codec import Codec
from forage.hardware import choose_matmul_kernel
from forage.rollout.engines.chat_engine import ChatEngine
from forage.rollout.engines.completions_engine import CompletionsEngine
from forage.rollout.engines.endpoint_client import EndpointClient
from forage.rollout.engines.torch.stopping import StopTable
from forage.rollout.engines.torch.torch_engine import TorchEngine
from forage.training.model import load_model, load_tokenizer, tokenizer_digest, weights_digest
from forage.types import Generate


def load_policy_tokenizer(config: RunConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of ``model.path``, without its chat format where the server writes one."""
    tokenizer = load_tokenizer(config.model)
    if config.model.endpoint is not None and config.model.endpoint.form == "chat":
        tokenizer.chat_template = None
    return tokenizer


@dataclass(frozen=True, slots=True)
class Policy:
    """What samples, and what tells it from another in an evaluation's fingerprint."""

    engine: Generate
    facts: dict[str, str]


@asynccontextmanager
async def open_policy(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[Policy]:
    """The engine, ready; raises ``UserError`` where there is no model or no server."""
    max_tokens = config.environment.max_tokens
    if config.model.endpoint is not None:
        engine = await _connect(config.model.endpoint, Codec(tokenizer), max_tokens)
        facts = _facts_of_server(config.model.endpoint, tokenizer)
    else:
        choose_matmul_kernel()
        model = load_model(config.model)
        engine = TorchEngine(model, StopTable.of(tokenizer), config.rollout.engine, max_tokens)
        facts = facts_of_weights(model, tokenizer)
    try:
        yield Policy(engine, facts)
    finally:
        await engine.close()


def facts_of_weights(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """A model in this process is told by its weights, not by where they lie."""
    return {"the weights": weights_digest(model), "the tokenizer": tokenizer_digest(tokenizer)}


def _facts_of_server(
    endpoint: EndpointConfig, tokenizer: PreTrainedTokenizerFast
) -> dict[str, str]:
    """A served model is told by its name: its weights cannot be seen from here."""
    return {
        "the tokenizer": tokenizer_digest(tokenizer),
        "model.endpoint.url": endpoint.base_url,
        "model.endpoint.served_model": endpoint.served_model,
        "model.endpoint.form": endpoint.form,
        "model.endpoint.omit": ", ".join(endpoint.omit),
        "model.endpoint.extra": json.dumps(endpoint.extra, sort_keys=True),
    }


async def _connect(
    endpoint: EndpointConfig, codec: Codec, max_tokens: int
) -> CompletionsEngine | ChatEngine:
    make = ChatEngine if endpoint.form == "chat" else CompletionsEngine
    engine = make(EndpointClient(endpoint), codec)
    try:
        await engine.check(max_tokens)
    except BaseException:
        await engine.close()
        raise
    return engine

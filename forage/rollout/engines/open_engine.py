"""Opens the engine that the settings name: to add one, write its file and a line here.

Training passes the model that it changes; an evaluation passes the model that it has loaded. A
server brings its own weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forage.config.model_config import EndpointConfig
from forage.config.run_config import RunConfig
from forage.environment.codec import Codec
from forage.rollout.engines.chat_engine import ChatEngine
from forage.rollout.engines.completions_engine import CompletionsEngine
from forage.rollout.engines.endpoint_client import EndpointClient
from forage.rollout.engines.engine import Engine
from forage.rollout.engines.engine_server import Addresses
from forage.rollout.engines.open_served import open_served
from forage.rollout.engines.torch.stopping import StopTable
from forage.rollout.engines.torch.torch_engine import TorchEngine


@asynccontextmanager
async def open_engine(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel | None,
    servers: Addresses | None = None,
) -> AsyncIterator[Engine]:
    """The engine, ready, closed at the end; raises ``UserError`` where no server answers.

    ``model`` is what the in-process engine samples with, None where ``model.endpoint`` samples.
    With ``servers``, these sample as ``placement.engine`` says: as soon as they have weights.
    """
    max_tokens = config.environment.max_tokens
    if servers is not None:
        async with open_served(config, servers, Codec(tokenizer)) as engine:
            yield engine
        return
    match config.model.endpoint:
        case None:
            assert model is not None, "the engine in this process samples with its caller's model"
            stop_table = StopTable.of(tokenizer)
            named = config.model.arithmetic
            dtype = None if named is None else getattr(torch, named)
            engine = TorchEngine(model, stop_table, config.rollout.engine, max_tokens, dtype=dtype)
        case EndpointConfig(form="chat") as endpoint:
            engine = ChatEngine(EndpointClient(endpoint), Codec(tokenizer))
        case endpoint:
            engine = CompletionsEngine(EndpointClient(endpoint), Codec(tokenizer))
    try:
        if not isinstance(engine, TorchEngine):
            await engine.check(max_tokens)
        yield engine
    finally:
        await engine.close()

"""The four clients of other people's servers, connected to a server of the test."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from aiohttp import web

from forage.config.model_config import EndpointConfig
from forage.config.search_config import SearchServer
from forage.remote.openai_replies import read_chat
from forage.remote.request import RemoteFailure
from forage.retrieval.client.client import SearchClient
from forage.retrieval.source import SourceError
from forage.retrieval.web.web_settings import read_web_settings
from forage.retrieval.web.web_source import WebSource
from forage.rewards.judge import Judge
from forage.rewards.reward_config import JudgeConfig
from forage.rollout.engines.endpoint_client import EndpointClient, EndpointFailure
from forage.types import FailureKind

FIRST_PAUSE_S = 0.001


@dataclass(frozen=True)
class Outcome:
    """The result for a client: no failure, or its kind (None if it reports none) and its
    message.
    """

    has_failed: bool
    kind: FailureKind | None = None
    said: str = ""


class User(Protocol):
    async def __call__(
        self, url: str, secret: Path | None = None, max_retries: int = 1, timeout_s: float = 5.0
    ) -> Outcome: ...


async def search_client(
    url: str, secret: Path | None = None, max_retries: int = 1, timeout_s: float = 5.0
) -> Outcome:
    limits = {"max_retries": max_retries, "timeout_s": timeout_s, "deadline_s": 8.0}
    settings = SearchServer.model_validate({"url": url, "token_file": secret, **limits})
    async with SearchClient(settings, FIRST_PAUSE_S) as client:
        reply = await client.search("ada")
    return Outcome(reply.failure is not None, reply.failure, reply.detail)


async def judge(
    url: str, secret: Path | None = None, max_retries: int = 1, timeout_s: float = 5.0
) -> Outcome:
    limits = {"max_retries": max_retries, "timeout_s": timeout_s, "deadline_s": 8.0}
    settings = {"url": f"{url}/v1", "key_file": secret, "cache": None, **limits}
    asked = Judge(JudgeConfig.model_validate(settings), FIRST_PAUSE_S)
    verdict = await asked.is_correct("Who?", ("Ada",), "Ada")
    await asked.close()
    if isinstance(verdict, RemoteFailure):
        return Outcome(True, verdict.kind, repr(verdict))
    return Outcome(False)


async def model_endpoint(
    url: str, secret: Path | None = None, max_retries: int = 1, timeout_s: float = 5.0
) -> Outcome:
    limits = {"max_retries": max_retries, "timeout_s": timeout_s}
    tree = {"url": f"{url}/v1", "served_model": "m", "key_file": secret, **limits}
    client = EndpointClient(EndpointConfig.model_validate(tree), FIRST_PAUSE_S)
    try:
        await client.ask("/chat/completions", {"model": "m"}, read_chat)
    except EndpointFailure as failure:
        return Outcome(True, failure.kind, str(failure))
    finally:
        await client.close()
    return Outcome(False)


async def web_source(
    url: str, secret: Path | None = None, max_retries: int = 1, timeout_s: float = 5.0
) -> Outcome:
    """A source reports the reason and whether it is temporary, but no kind."""
    texts = [f"url={url}/search", f"max_retries={max_retries}", f"timeout_s={timeout_s}"]
    texts += ["deadline_s=8", f"key_file={secret}" if secret else "requests_per_s=1000"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERPER_API_KEY", "from-the-environment")
        patch.setattr("forage.retrieval.web.web_source._FIRST_BACKOFF_S", FIRST_PAUSE_S)
        source = WebSource(read_web_settings("serper", texts))
    try:
        await asyncio.to_thread(source.search, ["ada"], 3)
    except SourceError as error:
        return Outcome(True, None, error.reason)
    finally:
        await asyncio.to_thread(source.close)
    return Outcome(False)


USERS: dict[str, User] = {
    "search": search_client,
    "judge": judge,
    "endpoint": model_endpoint,
    "web": web_source,
}


def right_answer(request: web.Request) -> web.Response:
    """The reply that the requesting client expects."""
    hits = [[{"document": {"id": "1", "contents": '"Ada"\nBorn 1815.'}, "score": 1.0}]]
    choice = {"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
    answers: dict[str, Any] = {
        "/retrieve": {"result": hits},
        "/v1/chat/completions": {"choices": [choice]},
        "/search": {"searchParameters": {}, "organic": [{"link": "https://a.org", "title": "Ada"}]},
    }
    return web.json_response(answers[request.path])

"""A chat endpoint with OpenAI's API as the writer, within a limit on its cost.

``forage.remote`` sends, retries and types failures. Here a failure concerns one prompt, or ends the
command: nothing answers, the key is refused, or the next request could exceed the limit.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forage.errors import UserError
from forage.questions.question_prompts import Prompt
from forage.questions.writers import MAX_REPLY_TOKENS, CostReached, WriterRefused, Written
from forage.remote.openai_client import OpenAIClient
from forage.remote.openai_replies import Usage, read_chat, read_usage
from forage.remote.request import RemoteFailure
from forage.remote.retry import Patience
from forage.remote.secret import read_key
from forage.types import FailureKind

_PATH = "/chat/completions"
_REFUSES_ALL = {401, 402, 403, 404, 429}
_MAX_FAILURES_IN_A_ROW = 8
_LONGEST_PAUSE_S = 30.0
_BYTES_PER_TOKEN = 3
"""English has more bytes per token; Chinese about three."""
_CHAT_FORMAT_TOKENS = 64
_PER_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """An endpoint; prices are for a million prompt and completion tokens."""

    url: str
    served_model: str
    key_variable: str | None = None
    key_file: Path | None = None
    concurrency: int = 16
    prices: tuple[float, float] | None = None
    max_cost: float = math.inf
    timeout_s: float = 120.0
    max_retries: int = 4
    first_pause_s: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"--endpoint is {self.url!r}; it must look like http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password or parts.query:
            raise UserError(
                "--endpoint contains a user, a password or a query, which logs would show; use "
                "--key-file or --key-variable"
            )
        if self.key_variable and self.key_file:
            raise UserError("--key-variable and --key-file both name a key; leave one of them out")
        if self.max_cost < math.inf and self.prices is None:
            raise UserError("--max-cost needs the prices per million tokens: --price INPUT OUTPUT")

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix(_PATH)


class EndpointWriter:
    """Writes through ``/chat/completions``; ``earlier`` is what was used before."""

    def __init__(self, settings: EndpointSettings, seed: int, earlier: Usage) -> None:
        key = read_key("the endpoint", settings.key_file, settings.key_variable)
        limits = (settings.timeout_s, settings.max_retries)
        patience = Patience(*limits, settings.first_pause_s, _LONGEST_PAUSE_S, is_paid=True)
        self.name = settings.served_model
        self._settings = settings
        self._client = OpenAIClient(
            "the endpoint", settings.base_url, key, patience, settings.concurrency
        )
        self._seed = seed
        self._earlier = earlier
        self._reserved = 0.0
        self._num_failures_in_a_row = 0

    async def write(self, prompt: Prompt, key: str, temperature: float) -> Written:
        text = prompt.as_text()
        digest = blake2b(f"{self._seed}/{key}".encode(), digest_size=8)
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": text}],
            "temperature": temperature,
            "max_tokens": MAX_REPLY_TOKENS,
            "seed": int.from_bytes(digest.digest(), "little") % 2**31,
            **self._settings.extra,
        }
        most = self._most(text)
        if self.total_cost() + self._reserved + most > self._settings.max_cost:
            raise CostReached
        self._reserved += most
        try:
            outcome = await self._client.ask(_PATH, body, _read)
        finally:
            self._reserved -= most
        if isinstance(outcome, RemoteFailure):
            raise await self._failure(outcome)
        self._num_failures_in_a_row = 0
        return outcome

    def cost(self, usage: Usage) -> float | None:
        if self._settings.prices is None:
            return None
        prompt, completion = self._settings.prices
        return (usage.prompt_tokens * prompt + usage.completion_tokens * completion) / _PER_MILLION

    def total_cost(self) -> float:
        """What has been spent, on replies that could not be used too."""
        return self.cost(self._earlier + self._client.counts.usage) or 0.0

    async def close(self) -> None:
        await self._client.close()

    def _most(self, text: str) -> float:
        """What a request could cost at most."""
        num_tokens = len(text.encode()) // _BYTES_PER_TOKEN + _CHAT_FORMAT_TOKENS
        return self.cost(Usage(num_tokens, 0, MAX_REPLY_TOKENS, 0)) or 0.0

    async def _failure(self, failure: RemoteFailure) -> Exception:
        """What a failed request means: the end of the command, or of one candidate."""
        self._num_failures_in_a_row += 1
        is_gone = failure.kind is FailureKind.UNAVAILABLE or failure.status in _REFUSES_ALL
        if not is_gone and self._num_failures_in_a_row < _MAX_FAILURES_IN_A_ROW:
            return WriterRefused(f"{failure.kind.value}: {failure.detail}")
        remedy = "Check the address and the server's log"
        models = await self._client.list_models() if failure.status in (400, 404) else None
        if models is not None and models.ids and self.name not in models.ids:
            names = ", ".join(sorted(models.ids)[:8])
            remedy = f"It serves {names}, not {self.name}: set --served-model"
        elif failure.status in _REFUSES_ALL:
            remedy = "Check --key-variable or --key-file, the quota, and --served-model"
        return UserError(
            f"the endpoint {self._settings.base_url} gives no replies ({failure.kind.value}: "
            f"{failure.detail}). {remedy}, then repeat the command: it continues where it stopped"
        )


@asynccontextmanager
async def open_endpoint_writer(
    settings: EndpointSettings, seed: int, earlier: Usage
) -> AsyncIterator[EndpointWriter]:
    """Opens a session, closed at the end; raises ``UserError`` for an unreadable key."""
    writer = EndpointWriter(settings, seed, earlier)
    try:
        yield writer
    finally:
        await writer.close()


def _read(document: dict[str, Any]) -> Written:
    """The text of a reply and its tokens; raises ``BadReply``."""
    return Written(read_chat(document).text, read_usage(document))

"""A language model as the judge of answers, behind any OpenAI-compatible endpoint.

``scorer.py`` asks it whether an answer means the same as a golden one. It reads the question, the
golden answers and what the policy answered, nothing else of an episode. Replies are kept on disk,
tries are bounded in number, time and concurrency, and what fails for good is a typed failure. The
key is sent in one header and stands in no message, record or exception.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from forage.errors import UserError
from forage.rewards.judge_cache import JudgeCache, cache_key
from forage.rewards.reward_config import JudgeConfig
from forage.types import FailureKind

LOG = logging.getLogger(__name__)

_SLOT = re.compile(r"\{(question|golden_answers|answer)\}")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_MAX_ANSWER_CHARACTERS = 2000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class JudgeFailure:
    """Why there is no verdict. ``is_final``: the same request would fail again."""

    kind: FailureKind
    detail: str
    is_final: bool = False
    retry_after_s: float = 0.0


class Judge:
    """Asks the model, once for each different question put to it; close it when done."""

    def __init__(self, config: JudgeConfig, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        """Read the key and the template, open the cache; raises ``UserError``."""
        self._config = config
        self._url = _endpoint(config.url)
        self._key = _read_key(config)
        self._template = _read_template(config.prompt)
        self._cache = JudgeCache.open(config.cache) if config.cache else None
        self._room = asyncio.Semaphore(config.max_concurrent_requests)
        self._asked: dict[str, asyncio.Task[bool | JudgeFailure]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._kinds_told: set[FailureKind] = set()
        self._jitter = random.Random()
        self._first_pause_s = first_pause_s
        self.num_requests = 0
        """Requests sent so far, retries included."""

    async def check(self) -> None:
        """Ask about a known answer, past the cache; ``UserError`` if there is no verdict."""
        outcome = await self._ask(self._prompt("What is the capital of France?", ["Paris"], "Rome"))
        if isinstance(outcome, JudgeFailure):
            raise UserError(
                f"the judge at {self._url} gives no verdict ({outcome.kind}: {outcome.detail}); "
                "look at reward.judge: url, model, and key_variable or key_file"
            )

    async def is_correct(
        self, question: str, golden_answers: Sequence[str], answer: str
    ) -> bool | JudgeFailure:
        """Whether ``answer`` means the same as a golden answer, or why nobody knows."""
        prompt = self._prompt(question, golden_answers, answer)
        config = self._config
        key = cache_key(self._url, config.model, config.max_tokens, prompt)
        cached = self._cache.get(key) if self._cache else None
        if cached is not None:
            return _read_verdict(cached)
        if key not in self._asked:  # the members of a group often answer alike
            self._asked[key] = asyncio.create_task(self._ask_and_keep(key, prompt))
        return await asyncio.shield(self._asked[key])

    async def close(self) -> None:
        """Give up what is being asked, and let go of the session and the cache."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._cache is not None:
            self._cache.close()

    async def _ask_and_keep(self, key: str, prompt: str) -> bool | JudgeFailure:
        try:
            outcome = await self._ask(prompt)
        finally:
            del self._asked[key]
        if isinstance(outcome, JudgeFailure):
            is_first = outcome.kind not in self._kinds_told  # the metrics count the others
            self._kinds_told.add(outcome.kind)
            level = logging.WARNING if is_first else logging.DEBUG
            LOG.log(level, "the judge gives no verdict (%s: %s)", outcome.kind, outcome.detail)
            return outcome
        if self._cache is not None:
            self._cache.put(key, outcome)
        return _read_verdict(outcome)

    async def _ask(self, prompt: str) -> str | JudgeFailure:
        """A reply that holds a verdict, after as many tries as settings and time allow."""
        config = self._config
        loop = asyncio.get_running_loop()
        async with self._room:
            deadline = loop.time() + config.deadline_s
            for tries in range(config.max_retries + 1):
                left_s = max(deadline - loop.time(), 0.001)  # 0 would mean no limit
                outcome = await self._post(prompt, min(config.timeout_s, left_s))
                if isinstance(outcome, str) or outcome.is_final:
                    return outcome
                pause_s = max(self._pause_s(tries), outcome.retry_after_s)
                if tries == config.max_retries or loop.time() + pause_s >= deadline:
                    return outcome
                await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns")

    async def _post(self, prompt: str, timeout_s: float) -> str | JudgeFailure:
        """One request: the text of the reply, or what became of it."""
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self.num_requests += 1
        try:
            async with self._open_session().post(
                self._url,
                json=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,  # the key is for this server alone
            ) as response:
                text = await response.text(errors="replace")
        except TimeoutError:
            return JudgeFailure(FailureKind.TIMEOUT, f"no reply within {timeout_s:.3g} s")
        except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
            return JudgeFailure(FailureKind.MALFORMED, f"no whole HTTP reply: {error}")
        except (aiohttp.ClientError, OSError) as error:
            return JudgeFailure(FailureKind.REFUSED, f"{type(error).__name__}: {error}")
        if response.status != 200:
            retry_after = response.headers.get("Retry-After", "")
            return self._failure_of_status(response.status, text, retry_after)
        return self._read_reply(text)

    def _failure_of_status(self, status: int, text: str, retry_after: str) -> JudgeFailure:
        detail = self._quote(f"HTTP {status}: {text}")
        wait_s = float(retry_after) if retry_after.isdecimal() else 0.0
        if status >= 500:
            return JudgeFailure(FailureKind.SERVER_ERROR, detail, retry_after_s=wait_s)
        is_final = status not in (408, 429)
        return JudgeFailure(FailureKind.REFUSED, detail, is_final, wait_s)

    def _read_reply(self, text: str) -> str | JudgeFailure:
        try:
            content: Any = json.loads(text)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            quoted = self._quote(text)
            return JudgeFailure(FailureKind.MALFORMED, f"no chat completion: {quoted}")
        if not isinstance(content, str) or _find_verdict(content) is None:
            quoted = self._quote(str(content))
            # Asked again at temperature 0 it would say the same.
            return JudgeFailure(FailureKind.MALFORMED, f"neither yes nor no: {quoted}", True)
        return content

    def _quote(self, text: str) -> str:
        """The beginning of what a server said, without the key, which some repeat."""
        if self._key:
            text = text.replace(self._key, "<key>")
        return text[:200]

    def _pause_s(self, tries: int) -> float:
        pause_s = min(self._first_pause_s * 2**tries, _LONGEST_PAUSE_S)
        return pause_s * self._jitter.uniform(0.5, 1.5)

    def _prompt(self, question: str, golden_answers: Sequence[str], answer: str) -> str:
        values = {
            "question": question,
            "golden_answers": list(golden_answers),
            "answer": answer[:_MAX_ANSWER_CHARACTERS],
        }
        text = _SLOT.sub(
            lambda slot: json.dumps(values[slot.group(1)], ensure_ascii=False), self._template
        )
        return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is not UTF-8

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session


def _find_verdict(reply: str) -> str | None:
    """The last "yes" or "no" outside of thoughts."""
    verdicts = _VERDICT.findall(_THOUGHT.sub("", reply))
    return verdicts[-1].lower() if verdicts else None


def _read_verdict(reply: str) -> bool:
    return _find_verdict(reply) == "yes"


def _endpoint(url: str | None) -> str:
    """The address to post to; raises ``UserError``."""
    assert url is not None, "checked by the config"
    try:
        parsed = URL(url)
    except ValueError as error:
        raise UserError(f"reward.judge.url {url!r} is not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"reward.judge.url is {url!r}; it must look like http://127.0.0.1:8001/v1")
    if parsed.user or parsed.password:
        raise UserError(
            "reward.judge.url holds a user or a password, which would be recorded with the run; "
            "name a key in reward.judge.key_variable or key_file"
        )
    return url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"


def _read_key(config: JudgeConfig) -> str | None:
    """The key, if there is one to be read; raises ``UserError``, which never shows it."""
    if config.key_variable is not None:
        key = os.environ.get(config.key_variable, "").strip()
        where = f"the environment variable {config.key_variable} (reward.judge.key_variable)"
    elif config.key_file is not None:
        where = f"the file {config.key_file} (reward.judge.key_file)"
        try:
            key = config.key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the judge's key from {where}: {error}") from None
    else:
        return None
    if not key or not key.isprintable():
        raise UserError(f"{where} holds no key for the judge; set it, or remove the setting")
    return key


def _read_template(path: Path | None) -> str:
    """The judge's prompt; raises ``UserError`` unless each slot is in it."""
    if path is None:
        folder = resources.files("forage.rewards") / "prompts"
        return (folder / "judge.txt").read_text(encoding="utf-8")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the judge's prompt {path}: {error}") from error
    missing = {"question", "golden_answers", "answer"} - set(_SLOT.findall(text))
    if missing:
        slots = ", ".join(f"{{{name}}}" for name in sorted(missing))
        raise UserError(f"the judge's prompt {path} has no place for {slots}")
    return text

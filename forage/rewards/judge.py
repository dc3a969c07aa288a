"""A language model as the judge of answers, on any OpenAI-compatible endpoint.

``scorer.py`` asks it whether an answer means the same as a golden one. It reads the question, the
golden answers and the policy's answer, nothing else of an episode. Replies with a verdict are
cached on disk; ``forage.remote`` sends the requests and types their failures.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import sqlite3
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Self

from yarl import URL

from forage.errors import UserError
from forage.remote.openai_client import OpenAIClient
from forage.remote.openai_replies import read_chat
from forage.remote.request import BadReply, RemoteFailure
from forage.remote.retry import Patience
from forage.remote.secret import read_key
from forage.rewards.reward_config import JudgeConfig

logger = logging.getLogger(__name__)

_SLOT = re.compile(r"\{(question|golden_answers|answer)\}")
_OPENED = re.compile(r"<(?:think|thinking|reasoning)>|\[THINK\]")
_CLOSED = re.compile(r"</(?:think|thinking|reasoning)>|\[/THINK\]")
_MARKUP = re.compile(r"</?\w+>|```\w*")
_VERDICT = re.compile(
    r"""[\W_]*
    (?: (?: (?:final[ ])?(?:judge?ment|verdict|decision|conclusion)(?:[ ]is)? | final[ ]answer
          | (?:is[ ](?:it[ ])?)?correct | answer(?=[\W_]{1,8}\w+[\W_]*\Z) )
        [\W_]{0,8}[:=?][\W_]{0,8} )?        # a label, also as a key of JSON
    (yes|no) (?![^\W_])
    (?! [\W_]{0,3}(?:/|\|)[\W_]{0,3}(?:yes|no)\b | [ ](?:or|and)[ ](?:yes|no)\b )    # "yes/no"
    (?! (?<=no)[ ]+(?!(?:it|this|that|the|they|there|because|since|as|but|not)\b)\w )  # "no doubt"
    """,
    re.IGNORECASE | re.VERBOSE,
)
_MAX_ANSWER_CHARACTERS = 2000
_PATH = "/chat/completions"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


class JudgeCache:
    """Replies on disk by key, so that the same question is paid for only once across all runs.

    It is one SQLite file, which several processes may share. Failures are not stored.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._is_broken = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens or creates the file; raises ``UserError``."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=10, isolation_level=None)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"cannot use {path} as the judge's cache: {error}; choose another "
                "reward.judge.cache, or null for none"
            ) from error
        return cls(connection)

    def get(self, key: str) -> str | None:
        """The reply stored under ``key``; None if there is none or the file has been damaged."""
        query = "SELECT reply FROM replies WHERE key = ?"
        try:
            row = self._connection.execute(query, (key,)).fetchone()
        except sqlite3.Error as error:
            return self._warn("cannot be read", error)
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        """Stores ``reply``; a full disk is reported once, and the run continues."""
        try:
            self._connection.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?)",
                (key, reply.encode("utf-8", "replace").decode("utf-8")),
            )
        except sqlite3.Error as error:
            self._warn("cannot store any more", error)

    def _warn(self, what: str, error: sqlite3.Error) -> None:
        if not self._is_broken:
            logger.warning("the judge's cache %s: %s", what, error)
        self._is_broken = True

    def close(self) -> None:
        self._connection.close()


class Judge:
    """Queries the model once per distinct question; close it when done."""

    def __init__(self, config: JudgeConfig, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        """Reads the key and the template, and opens the cache; raises ``UserError``."""
        url = judge_address(config.url)
        key = read_key("reward.judge", config.key_file, config.key_variable)
        limits = (config.timeout_s, config.max_retries)
        patience = Patience(*limits, first_pause_s, _LONGEST_PAUSE_S, is_paid=True)
        self._config = config
        self._url = url + _PATH
        self._client = OpenAIClient("the judge", url, key, patience, config.max_concurrent_requests)
        self._room = asyncio.Semaphore(config.max_concurrent_requests)
        self._template = _read_template(config.prompt)
        self._cache = JudgeCache.open(config.cache) if config.cache else None
        self._asked: dict[str, asyncio.Task[bool | RemoteFailure]] = {}

    @property
    def num_requests(self) -> int:
        """The number of requests sent so far, including retries."""
        return self._client.counts.requests

    async def check(self) -> None:
        """Asks about a known answer, bypassing the cache; ``UserError`` if there is no verdict."""
        outcome = await self._ask(self._prompt("What is the capital of France?", ["Paris"], "Rome"))
        if isinstance(outcome, RemoteFailure):
            raise UserError(
                f"the judge at {self._url} gives no verdict ({outcome.kind}: {outcome.detail}); "
                "check reward.judge: url, model, and key_variable or key_file"
            )

    async def is_correct(
        self, question: str, golden_answers: Sequence[str], answer: str
    ) -> bool | RemoteFailure:
        """Whether ``answer`` means the same as a golden answer, or why the judge could not say."""
        prompt = self._prompt(question, golden_answers, answer)
        config = self._config
        depends_on = json.dumps([self._url, config.model, config.max_tokens, prompt])
        key = hashlib.sha256(depends_on.encode("utf-8")).hexdigest()
        cached = self._cache.get(key) if self._cache else None
        if cached is not None and (verdict := _find_verdict(cached)):
            return verdict == "yes"
        if key not in self._asked:  # members of a group often give the same answer
            self._asked[key] = asyncio.create_task(self._ask_and_keep(key, prompt))
        return await asyncio.shield(self._asked[key])

    async def close(self) -> None:
        """Cancels pending requests, and closes the session and the cache."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
        if self._cache is not None:
            self._cache.close()

    async def _ask_and_keep(self, key: str, prompt: str) -> bool | RemoteFailure:
        try:
            outcome = await self._ask(prompt)
        finally:
            del self._asked[key]
        if isinstance(outcome, RemoteFailure):
            return outcome
        if self._cache is not None:
            self._cache.put(key, outcome)
        return _find_verdict(outcome) == "yes"

    async def _ask(self, prompt: str) -> str | RemoteFailure:
        """A reply with a verdict, after as many attempts as settings and time allow."""
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }
        async with self._room:  # the deadline excludes waiting for this slot
            deadline = asyncio.get_running_loop().time() + self._config.deadline_s
            return await self._client.ask(_PATH, body, _read_reply, deadline)

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


def _read_reply(document: dict[str, Any]) -> str:
    """The text of a reply with a verdict; raises ``BadReply``."""
    choice = read_chat(document)
    text = choice.text if choice.message.content is not None else ""  # a refusal judges nothing
    if _find_verdict(text) is None:
        # A retry at temperature 0 would give the same reply.
        raise BadReply(f"it begins with neither yes nor no: {text}", may_pass=False)
    return text


def _find_verdict(reply: str) -> str | None:
    """The "yes" or "no" that opens the reply, after thoughts and a label; None if there is none.

    ``No, because the golden answer is "yes".`` is a no, ``Verdict: yes`` a yes, ``No doubt about
    it: yes`` neither.
    """
    # The prompt may have opened the thought, and max_tokens may have truncated it.
    conclusion = _OPENED.split(_CLOSED.split(reply)[-1])[0]
    verdict = _VERDICT.match(_MARKUP.sub(" ", conclusion))
    return verdict[1].lower() if verdict else None


def judge_address(url: str | None) -> str:
    """The base address of the API's paths; raises ``UserError``."""
    assert url is not None, "the config requires it"
    try:
        parsed = URL(url)
    except ValueError as error:
        raise UserError(f"reward.judge.url {url!r} is not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"reward.judge.url is {url!r}; it must look like http://127.0.0.1:8001/v1")
    if parsed.user or parsed.password:
        raise UserError(
            "reward.judge.url contains a user name or a password, which would be recorded with the "
            "run; name a key in reward.judge.key_variable or key_file"
        )
    return url.rstrip("/").removesuffix(_PATH)


def _read_template(path: Path | None) -> str:
    """The judge's prompt; raises ``UserError`` unless it has every slot."""
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
        raise UserError(f"the judge's prompt {path} does not contain {slots}; add it")
    return text

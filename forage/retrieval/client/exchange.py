"""One HTTP exchange with a search server, and what its outcome means for the next try.

The client decides when to try again; this file sends one request and sorts what comes back into
hits or a typed failure, so that nothing above it sees an exception of the HTTP library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto

import aiohttp

from forage.retrieval.wire import (
    AccessRequest,
    MalformedReply,
    RetrieveRequest,
    Wire,
    read_page,
    read_reply,
    replace_surrogates,
)
from forage.types import FailureKind, Hit, PageText

# A reply of thousands of passages takes long enough to parse to hold up the other episodes.
_PARSE_IN_THREAD_BYTES = 4 * 2**20


class Blame(Enum):
    """Where the reason of a failure lies, which decides who is asked next."""

    SERVER = auto()  # it failed: another may do better, and so may it, later
    LOAD = auto()  # it is well and busy
    ACCESS = auto()  # it does not take our token
    ADDRESS = auto()  # what answers there is no search server
    QUERIES = auto()  # the request is wrong, and would be anywhere


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an exchange gave nothing; ``retry_after_s`` is the server's own wish."""

    kind: FailureKind
    detail: str
    blame: Blame = Blame.SERVER
    retry_after_s: float = 0.0

    @property
    def is_final(self) -> bool:
        """The same request would fail again, whoever is asked."""
        return self.blame is Blame.QUERIES


async def retrieve(
    session: aiohttp.ClientSession, url: str, queries: Sequence[str], topk: int, timeout_s: float
) -> list[tuple[Hit, ...]] | Failure:
    """Ask ``url`` once: the hits of each query, or why there are none."""
    request = RetrieveRequest(
        queries=[replace_surrogates(query) for query in queries], topk=topk, return_scores=True
    )
    body = await _post(session, f"{url}/retrieve", request, timeout_s)
    if isinstance(body, Failure):
        return body
    try:
        if len(body) > _PARSE_IN_THREAD_BYTES:
            return await asyncio.to_thread(read_reply, body, len(queries), topk)
        return read_reply(body, len(queries), topk)
    except MalformedReply as error:
        return Failure(FailureKind.MALFORMED, str(error))


async def access(
    session: aiohttp.ClientSession, url: str, request: AccessRequest, timeout_s: float
) -> PageText | Failure | None:
    """Ask ``url`` once for the page of one address: the page, None, or why it is not known."""
    body = await _post(session, f"{url}/access", request, timeout_s)
    if isinstance(body, Failure):
        # A server without pages is a good server for searches, so it is not to blame.
        is_address = body.blame is Blame.ADDRESS
        return replace(body, blame=Blame.QUERIES) if is_address else body
    try:
        return read_page(body)
    except MalformedReply as error:
        return Failure(FailureKind.MALFORMED, str(error))


async def _post(
    session: aiohttp.ClientSession, url: str, request: Wire, timeout_s: float
) -> bytes | Failure:
    """The body of the reply, or why there is none."""
    try:
        async with session.post(
            url,
            json=request.model_dump(exclude_none=True),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as response:
            body = await response.read()
    except TimeoutError:
        return Failure(FailureKind.TIMEOUT, f"no reply within {timeout_s:.3g} s")
    except aiohttp.ClientPayloadError as error:
        return Failure(FailureKind.MALFORMED, f"the reply broke off: {error}")
    except aiohttp.ClientResponseError as error:
        return Failure(FailureKind.MALFORMED, f"not an HTTP reply: {error.message}")
    except (aiohttp.ClientError, OSError) as error:
        return Failure(FailureKind.REFUSED, f"{type(error).__name__}: {error}")
    if response.status != 200:
        return _failure_of_status(response.status, response.headers.get("Retry-After"), body)
    return body


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says that it searches; ``num_passages`` None where it does not say."""

    backend: str
    num_passages: int | None


async def ask_what_is_served(
    session: aiohttp.ClientSession, url: str, timeout_s: float
) -> Served | None:
    """What the ``/readyz`` at ``url`` tells, or None: Search-R1's server has none, for example."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            told = await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    backend = told.get("backend") if isinstance(told, dict) else None
    if told is None or not isinstance(backend, str):
        return None
    num_passages = told.get("passages")
    return Served(backend, num_passages if isinstance(num_passages, int) else None)


def _failure_of_status(status: int, retry_after: str | None, body: bytes) -> Failure:
    detail = f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}"
    wait_s = retry_after_seconds(retry_after)
    if status == 429:
        return Failure(FailureKind.REFUSED, detail, Blame.LOAD, wait_s)
    if status in (408, 504):
        return Failure(FailureKind.TIMEOUT, detail, retry_after_s=wait_s)
    if status >= 500:
        return Failure(FailureKind.SERVER_ERROR, detail, retry_after_s=wait_s)
    if status in (401, 403):
        return Failure(FailureKind.REFUSED, detail, Blame.ACCESS)
    if status < 400 or status in (404, 405):
        return Failure(FailureKind.REFUSED, detail, Blame.ADDRESS)
    return Failure(FailureKind.REFUSED, detail, Blame.QUERIES)


def retry_after_seconds(retry_after: str | None) -> float:
    """``Retry-After`` in seconds: a number, or a date; 0.0 where absent or unreadable."""
    if retry_after is None:
        return 0.0
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())

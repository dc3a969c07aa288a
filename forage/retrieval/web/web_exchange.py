"""One paid request to a web provider, and what its outcome means for the next try.

Sends what ``forage.retrieval.web.providers`` describes and sorts what comes back into results or a
typed failure. No key leaves this file by another way than the request: not in a reason (providers
repeat keys in error messages, HTTP libraries repeat addresses), not in a log, not to a redirect's
target. When to try again, and what may be spent, is the source's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import aiohttp

from forage.retrieval.client.exchange import Blame, Failure, retry_after_seconds
from forage.retrieval.web.provider_replies import BadReply, WebResult
from forage.retrieval.web.providers import Provider
from forage.types import FailureKind

_MAX_REPLY_BYTES = 8 * 2**20
_MAX_REASON_CHARS = 200


async def ask_provider(
    session: aiohttp.ClientSession, provider: Provider, query: str, timeout_s: float
) -> list[WebResult] | Failure:
    """Ask once: the results (none where nothing was found), or why there are none."""
    request = provider.request(query)
    try:
        async with session.request(
            request.method,
            request.url,
            headers=request.headers,
            params=request.params,
            json=request.body,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as response:
            body = await _read_up_to(response, _MAX_REPLY_BYTES)
    except TimeoutError:
        return Failure(FailureKind.TIMEOUT, f"no reply within {timeout_s:.3g} s")
    except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
        return Failure(FailureKind.MALFORMED, f"not a whole HTTP reply ({type(error).__name__})")
    except (aiohttp.ClientError, OSError) as error:
        # Only the kind of error: its text may hold the address, and the address the key.
        return Failure(FailureKind.REFUSED, f"cannot be reached ({type(error).__name__})")
    if response.status != 200:
        reason = _what_it_says(body)
        return _failure(provider, response.status, reason, response.headers.get("Retry-After"))
    if len(body) > _MAX_REPLY_BYTES:
        return Failure(FailureKind.MALFORMED, f"a reply of more than {_MAX_REPLY_BYTES} bytes")
    try:
        return provider.read(json.loads(body))
    except BadReply as error:
        if error.status is None:
            return Failure(FailureKind.MALFORMED, f"HTTP 200: {_clean(str(error), provider)}")
        return _failure(provider, error.status, str(error), None)
    except (ValueError, RecursionError):
        return Failure(FailureKind.MALFORMED, "HTTP 200, but not JSON")


async def _read_up_to(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_chunked(2**16):
        body += piece
        if len(body) > max_bytes:
            break
    return bytes(body)


def _failure(provider: Provider, status: int, reason: str, retry_after: str | None) -> Failure:
    detail = f"HTTP {status}" + (f": {_clean(reason, provider)}" if reason else "")
    wait_s = retry_after_seconds(retry_after)
    if status in (408, 429):
        return Failure(FailureKind.REFUSED, detail, retry_after_s=wait_s)
    if status >= 500:
        return Failure(FailureKind.SERVER_ERROR, detail, retry_after_s=wait_s)
    return Failure(FailureKind.REFUSED, detail, Blame.QUERIES)


def _what_it_says(body: bytes) -> str:
    """The message in an error document of any of the providers, or ""."""
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    while isinstance(reply, dict):
        reply = next((reply[k] for k in ("error", "message", "detail", "code") if k in reply), "")
    return reply if isinstance(reply, str) else ""


def _clean(reason: str, provider: Provider) -> str:
    """``reason`` on one line, cut, and without the provider's secrets."""
    return " ".join(hide(reason, provider.secrets).split())[:_MAX_REASON_CHARS]


def hide(text: str, secrets: Sequence[str]) -> str:
    """``text`` with each secret blotted out, also where an address spells some of it in percent."""
    for secret in secrets:
        spellings = (f"(?:{re.escape(c)}|%{ord(c):02X}|%{ord(c):02x})" for c in secret)
        text = re.sub("".join(spellings), "***", text)
    return text

"""One request to a server of OpenAI's API, and what its outcome means for the next try.

Sorts whatever comes back into a JSON document or a typed refusal, so that nothing above it sees an
exception of the HTTP library, takes a proxy's HTML for a reply, or takes an error that came with
status 200 for a completion. What a document holds is read in ``endpoint_wire``; when to try again
is decided in ``endpoint_client``. The key leaves by the session's header alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

from forage.retrieval.client.exchange import retry_after_seconds
from forage.retrieval.web.web_exchange import hide
from forage.types import FailureKind

_MAX_REPLY_BYTES = 64 * 2**20
_MAX_REASON_CHARS = 300

# How servers say that prompt and completion do not fit: OpenAI and vLLM ("maximum context length",
# "longer than the maximum model length", "too long to fit into the model"), SGLang ("longer than
# the model's context length"), llama.cpp ("context size"), Anthropic ("prompt is too long").
_OVERFLOW = re.compile(
    r"context[ _](?:length|size|window)|maximum model length|max_model_len"
    r"|(?:prompt|input) [^.]{0,60}too long",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request gave nothing; ``may_pass`` if the same request may do better later.

    ``status`` is the HTTP status of an error, 0 where there was none.
    """

    kind: FailureKind
    detail: str
    may_pass: bool = True
    is_overflow: bool = False
    retry_after_s: float = 0.0
    status: int = 0


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: dict[str, Any] | None,
    timeout_s: float,
    secrets: tuple[str, ...],
) -> dict[str, Any] | Refusal:
    """Send once: the reply's JSON object, or why there is none."""
    try:
        async with session.request(
            method,
            url,
            json=body,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,  # the key is for this address
        ) as response:
            content = await _read_up_to(response, _MAX_REPLY_BYTES)
    except TimeoutError:
        return Refusal(FailureKind.TIMEOUT, f"no reply within {timeout_s:.3g} s")
    except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
        return Refusal(FailureKind.MALFORMED, f"not a whole HTTP reply ({type(error).__name__})")
    except (aiohttp.ClientError, OSError) as error:
        # Only the kind of error: its text may repeat headers.
        return Refusal(FailureKind.UNAVAILABLE, f"cannot be reached ({type(error).__name__})")
    if len(content) > _MAX_REPLY_BYTES:
        return Refusal(FailureKind.MALFORMED, f"a reply of more than {_MAX_REPLY_BYTES} bytes")
    document = _json_object(content)
    if response.status != 200:
        wait_s = retry_after_seconds(response.headers.get("Retry-After"))
        return _refusal(response.status, document, wait_s, secrets)
    if document is None:
        kind = response.headers.get("Content-Type", "unknown").partition(";")[0]
        return Refusal(FailureKind.MALFORMED, f"HTTP 200 with {kind[:40]}, not a JSON object")
    if document.get("error") or document.get("object") == "error":
        return _refusal(_status_inside(document), document, 0.0, secrets)
    return document


async def _read_up_to(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_chunked(2**16):
        body += piece
        if len(body) > max_bytes:
            break
    return bytes(body)


def _refusal(
    status: int, document: dict[str, Any] | None, wait_s: float, secrets: tuple[str, ...]
) -> Refusal:
    reason, code = _what_it_says(document)
    detail = f"HTTP {status}" + (f": {_clean(reason, secrets)}" if reason else "")
    if status == 429:
        has_credit = code != "insufficient_quota"
        return Refusal(FailureKind.REFUSED, detail, has_credit, retry_after_s=wait_s, status=status)
    if status in (408, 504):
        return Refusal(FailureKind.TIMEOUT, detail, retry_after_s=wait_s, status=status)
    if status >= 500:
        return Refusal(FailureKind.SERVER_ERROR, detail, retry_after_s=wait_s, status=status)
    is_overflow = status in (400, 413, 422) and bool(_OVERFLOW.search(f"{code} {reason}"))
    return Refusal(FailureKind.REFUSED, detail, False, is_overflow, status=status)


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _status_inside(document: dict[str, Any]) -> int:
    """The HTTP status that an error document under HTTP 200 speaks of; 500 where it is silent."""
    error = document.get("error")
    code = error.get("code") if isinstance(error, dict) else document.get("code")
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _what_it_says(document: dict[str, Any] | None) -> tuple[str, str]:
    """The message and the code of an error document, "" where it has none."""
    inside: Any = document or {}
    while isinstance(inside, dict) and isinstance(inside.get("error"), dict | str):
        inside = inside["error"]
    if isinstance(inside, str):
        return inside, ""
    message = next((inside[k] for k in ("message", "detail", "msg") if k in inside), "")
    code = inside.get("code") or inside.get("type")
    return (
        message if isinstance(message, str) else json.dumps(message),
        code if isinstance(code, str) else "",
    )


def _clean(reason: str, secrets: tuple[str, ...]) -> str:
    """``reason`` on one line, cut, and without the key, which servers like to repeat."""
    return " ".join(hide(reason, secrets).split())[:_MAX_REASON_CHARS]

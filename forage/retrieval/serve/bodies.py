"""From the bytes of a request to what it asks, without holding up other requests.

A small body is read at once, on the event loop. A large one is read in a thread, and by the JSON
reader of Python that is written in Python: the one in C is faster, but every other thread waits
until it is through (3 s for 16 MB of empty lists).
"""

from __future__ import annotations

import asyncio
import json
import json.scanner
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from forage.remote.request import Shape
from forage.retrieval.serve.batcher import WorkThread

T = TypeVar("T")
S = TypeVar("S", bound=Shape)

_LARGE = 2**16
# Of a large body: 16 MB of questions have half as many. What is checked and freed at once stays
# short with them.
_MAX_COMMAS, _MAX_BRACKETS = 2**19, 2**18


class BodyReader:
    """Reads large bodies one after the other, those of one address never at the same time."""

    def __init__(self) -> None:
        self._thread = WorkThread("bodies")
        # Of addresses that have a body in line; one that nobody holds any more is forgotten.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, read: Callable[[bytes], T], body: bytes, address: str) -> T:
        """What ``read`` makes of a body, or raises about it."""
        if len(body) <= _LARGE:
            return read(body)
        # With one body of each address in line, addresses take turns.
        async with self._locks.setdefault(address, asyncio.Lock()):
            return await self._thread.run(read, body)

    async def close(self) -> None:
        """End the thread; a body that it reads is given up."""
        await self._thread.close(timeout_s=0)


def read_json(model: type[S], body: bytes) -> S:
    """The request in a body; raises ``HTTPException`` (413, 422) that says what is wrong with it.

    The request's own text is not sent back.
    """
    try:
        # Not model_validate_json: Python's reader takes the lone surrogates that clients send.
        content = json.loads(body) if len(body) <= _LARGE else _read_large(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the body is not JSON: {_reason(error)}") from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[:5]
        reasons = (
            f"{'.'.join(str(part) for part in ('body', *w['loc']))}: {w['msg']}" for w in wrong
        )
        raise HTTPException(422, "; ".join(reasons)) from None


class _ReaderInPython(json.JSONDecoder):
    """``json.loads``, with other threads at work between any two values."""

    def __init__(self) -> None:
        super().__init__()
        # Not in the stubs of the standard library.
        self.scan_once = json.scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]


def _read_large(body: bytes) -> object:
    if body.count(b",") > _MAX_COMMAS:
        raise HTTPException(413, f"the body has more than {_MAX_COMMAS} commas; send it in parts")
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise HTTPException(
            413, f"the body has more than {_MAX_BRACKETS} opening brackets; send it in parts"
        )
    return json.loads(body, cls=_ReaderInPython)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "too deep or too large"

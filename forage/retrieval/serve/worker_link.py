"""Questions and answers between an HTTP process and the process that owns the source.

Both ends of one socket pair that the owner made before it started the other process, so nobody
else can speak on it (which is why pickled messages are safe). Many questions may be under way; each
has a number that its answer carries.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from forage.retrieval.serve.batcher import AsksTogether
from forage.retrieval.source import SourceError
from forage.types import Hit, Passage

# Plain tuples pickle several times faster than the dataclasses they stand for.
_Hit = tuple[str, str, str, float]
_LENGTH_BYTES = 4


class FrontEnd:
    """The HTTP process's end: asks the owner, like a batcher of its own."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        """``on_lost`` is called when the owner has gone; questions fail from then on."""
        self._on_lost = on_lost
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[list[list[Hit]]]] = {}
        self._writer: asyncio.StreamWriter | None = None

    @asynccontextmanager
    async def connected(self, sock: socket.socket) -> AsyncIterator[None]:
        """Speak on ``sock`` until the body ends."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        reading = asyncio.create_task(self._read(reader))
        try:
            yield
        finally:
            self._writer.close()
            await asyncio.gather(reading, return_exceptions=True)

    async def say_ready(self) -> None:
        """Tell the owner that this process takes requests."""
        assert self._writer is not None, "connected before it is ready"
        self._writer.write(_packed(("ready",)))

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The owner's hits of each query; raises ``SourceError``."""
        if self._writer is None or self._writer.is_closing():
            raise SourceError("the process that owns the index has gone")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(_packed(("search", number, list(queries), topk)))
        try:
            return await answer
        except asyncio.CancelledError:
            self._writer.write(_packed(("cancel", number)))
            raise
        finally:
            del self._answers[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await _receive(reader)) is not None:
            number, outcome = message
            answer = self._answers.get(number)
            if answer is None or answer.done():
                continue  # its caller has gone
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result([[_hit(*hit) for hit in hits] for hits in outcome])
        assert self._writer is not None, "connected before it is read"
        self._writer.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SourceError("the process that owns the index has gone"))
        self._on_lost()


async def answer_front(
    sock: socket.socket, asks: AsksTogether, on_ready: Callable[[], Awaitable[None]]
) -> None:
    """The owner's end: answer one HTTP process until it has gone."""
    reader, writer = await asyncio.open_connection(sock=sock)
    under_way: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, queries: list[str], topk: int) -> None:
        try:
            found = await asks.search(queries, topk)
            outcome: object = [[_plain(hit) for hit in hits] for hits in found]
        except SourceError as error:
            outcome = error
        except Exception as error:  # whatever it was, the process that asked answers for it
            outcome = RuntimeError(f"{type(error).__name__}: {error}")
        finally:
            del under_way[number]
        writer.write(_packed((number, outcome)))
        await writer.drain()

    with contextlib.closing(writer):
        while (message := await _receive(reader)) is not None:
            match message:
                case ("ready",):
                    await on_ready()
                case ("search", number, queries, topk):
                    under_way[number] = asyncio.create_task(answer(number, queries, topk))
                case ("cancel", number) if number in under_way:
                    under_way[number].cancel()
        for task in list(under_way.values()):
            task.cancel()


def _packed(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def _receive(reader: asyncio.StreamReader) -> tuple | None:
    """The next message, or None when the other side has gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _plain(hit: Hit) -> _Hit:
    passage = hit.passage
    return passage.id, passage.title, passage.text, hit.score


def _hit(identity: str, title: str, text: str, score: float) -> Hit:
    return Hit(Passage(identity, title, text), score)

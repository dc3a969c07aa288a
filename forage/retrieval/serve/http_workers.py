"""Several HTTP processes before one owner of the source.

The owner (the process of ``forage serve``) holds the source, the cache and the batches; each front
parses HTTP, checks requests and writes replies, and sends the queries to the owner. A front that
dies is started again; an owner that dies takes its fronts along. Every front has a listening socket
of its own, so that the kernel spreads the connections; figures lie in memory they all read.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import socket
from collections.abc import Awaitable, Callable, MutableSequence, Sequence
from multiprocessing.process import BaseProcess

from forage.errors import UserError
from forage.retrieval.serve.app import AppSettings, build_app
from forage.retrieval.serve.batcher import Batcher
from forage.retrieval.serve.metrics import ROW_SIZE, Figure, Figures
from forage.retrieval.serve.running import HttpServer
from forage.retrieval.serve.worker_link import FrontEnd, answer_front
from forage.retrieval.source import Source, SourceFacts
from forage.retrieval.sources.compose import ServeSettings, open_page_store

logger = logging.getLogger(__name__)

_CONTEXT = multiprocessing.get_context("spawn")  # a fork would copy the source's threads, broken
_KILL_S = 5.0


def serve_with_fronts(
    settings: ServeSettings,
    source: Source,
    socks: Sequence[socket.socket],
    on_ready: Callable[[], Awaitable[None]],
) -> bool:
    """Serve ``source`` through one front a socket until SIGTERM or Ctrl-C; raises ``UserError``.

    False if a search still runs when the drain is over.
    """
    return asyncio.run(_Owner(settings, source, socks, on_ready).run())


class _Owner:
    """The process that holds the source, and its fronts."""

    def __init__(
        self,
        settings: ServeSettings,
        source: Source,
        socks: Sequence[socket.socket],
        on_ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._socks = socks
        self._facts = SourceFacts.of(source)
        self._rows = [_CONTEXT.RawArray("d", ROW_SIZE) for _ in range(len(socks) + 1)]
        self._source = source
        self._on_ready = on_ready
        self._num_starting = len(socks)
        self._stop = asyncio.Event()
        self._processes: dict[int, BaseProcess] = {}

    async def run(self) -> bool:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._stop.set)
        figures = Figures(self._rows, own=len(self._socks))
        self._batcher = Batcher(self._source, figures, cache_size=self._settings.cache_size)
        keeping = [asyncio.create_task(self._keep(place)) for place in range(len(self._socks))]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stopping, *keeping], return_when=asyncio.FIRST_COMPLETED)
            self._stop.set()
            for process in self._processes.values():
                process.terminate()
            await asyncio.wait(keeping, timeout=self._settings.drain_s + _KILL_S)
            for task in keeping:
                if task.done():
                    task.result()
        finally:
            for process in self._processes.values():
                process.kill()
            await asyncio.gather(*keeping, return_exceptions=True)
            await self._batcher.close()
        return self._batcher.is_idle

    async def _keep(self, place: int) -> None:
        """Run a front until the stop; one that dies is started again, unless it never was ready."""
        is_ready = False

        async def on_ready() -> None:
            nonlocal is_ready
            if not is_ready:
                is_ready = True
                self._num_starting -= 1
                if self._num_starting == 0:
                    await self._on_ready()

        while True:
            ours, theirs = socket.socketpair()
            process = _CONTEXT.Process(
                target=run_front,
                args=(self._settings, self._facts, self._rows, place, self._socks[place], theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes[place] = process
            await answer_front(ours, self._batcher, on_ready)
            await asyncio.to_thread(process.join)
            self._rows[place][Figure.IN_FLIGHT] = 0
            if self._stop.is_set():
                return
            status = process.exitcode
            if not is_ready:
                raise UserError(f"an HTTP process ended with status {status} before it was ready")
            logger.warning("an HTTP process ended with status %s; it is started again", status)


def run_front(
    settings: ServeSettings,
    facts: SourceFacts,
    rows: Sequence[MutableSequence[float]],
    place: int,
    sock: socket.socket,
    link: socket.socket,
) -> None:
    """The main function of a front."""
    logging.basicConfig(level=logging.WARNING)
    limits = settings.limits
    share = -(-limits.max_in_flight // settings.workers)
    owner = FrontEnd(on_lost=lambda: server.stop())
    app = build_app(
        facts,
        owner,
        open_page_store(settings),
        AppSettings(
            settings.topk, settings.token, limits.model_copy(update={"max_in_flight": share})
        ),
        Figures(rows, own=place),
        owner.connected(link),
    )
    server = HttpServer(app, settings.drain_s, owner.say_ready)
    server.run_on(sock)

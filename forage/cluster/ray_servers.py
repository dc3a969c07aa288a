"""Servers as processes on machines of Ray's, each kept by an actor beside it.

An actor starts its server, says whether it runs, and starts it again; the server ends with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from forage.cluster.ray_actors import Actor, ActorLostError, OnRay, Reply
from forage.errors import UserError
from forage.remote.child_process import ChildProcess
from forage.retrieval.serve.port import bind_port

_STOP_S = 30.0
_LOST = -9
"""The status of a server whose actor is gone, and whose process went with it."""

EnvironmentOf = Callable[[dict[str, str]], dict[str, str]]


class ServerActor(OnRay):
    """Keeps one server."""

    _process: ChildProcess | None = None

    def free_port(self, address: str) -> int:
        with bind_port(address, 0) as free:
            return free.getsockname()[1]

    def start(
        self, name: str, command: Sequence[str], log_path: Path, environment: EnvironmentOf
    ) -> None:
        """On the thread that runs all its methods: the server ends with that."""
        self._process = ChildProcess(name, command, log_path, environment(dict(os.environ)))
        self._process.start()

    def status(self) -> int | None:
        assert self._process is not None, "it has been started"
        return self._process.status

    def last_words(self) -> str:
        return self._process.last_words() if self._process is not None else ""

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class RayHost:
    """The place of one server: see ``ServerHost``. A lost actor is made anew at its place."""

    def __init__(self, make_actor: Callable[[], Actor], environment: EnvironmentOf) -> None:
        """``environment`` makes of the machine's what the server sees."""
        self._make_actor = make_actor
        self._environment = environment
        self._actor = make_actor()
        self.address = self._actor.spot().address

    def free_port(self) -> int:
        return self._actor.ask("free_port", self.address).take()

    async def start(self, name: str, command: Sequence[str], log_path: Path) -> RayServer:
        return await asyncio.to_thread(self._start, name, command, log_path)

    def _start(self, name: str, command: Sequence[str], log_path: Path) -> RayServer:
        try:
            self._actor.ask("spot").take()
        except (ActorLostError, TimeoutError):
            self._actor.kill()
            self._actor = self._make_actor()
            if (found := self._actor.spot().address) != self.address:
                raise UserError(
                    f"the machine {self.address} of a server is lost, and Ray gives {found} for "
                    "it; go on with --resume"
                ) from None
        asked = self._actor.ask("start", name, command, log_path.absolute(), self._environment)
        return RayServer(self._actor, asked)

    def close(self) -> None:
        self._actor.kill()


class RayServer:
    """One start of a server; its state is asked for, and never waited for on the event loop."""

    def __init__(self, actor: Actor, started: Reply) -> None:
        self._actor = actor
        self._asked = started
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        """As it was known last."""
        if self._status is None and self._asked.is_there:
            try:
                self._status = self._asked.take()
            except ActorLostError:
                self._status = _LOST
            self._asked = self._actor.ask("status")
        return self._status

    def last_words(self) -> str:
        try:
            return self._actor.ask("last_words").take()
        except (ActorLostError, TimeoutError) as error:
            return f"(its actor does not answer: {error})"

    def stop(self) -> None:
        try:
            self._actor.ask("stop").take(_STOP_S)
        except (ActorLostError, TimeoutError):
            self._actor.kill()

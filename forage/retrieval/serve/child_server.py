"""Runs a search server as a child process, for commands that need it only while they run.

The demo and tests use it; ``forage.remote.child_process`` starts it and ends it with this process.
"""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from forage.errors import UserError
from forage.remote.child_process import ChildProcess
from forage.retrieval.serve.port import bind_port

_HOST = "127.0.0.1"
_POLL_S = 0.05


class ServerProcess:
    """A search server in a child process: ``with ServerProcess(index_dir) as server: server.url``.

    Enter it on a thread that outlives the server: the kernel ties the child to the thread that
    started it.
    """

    def __init__(
        self,
        index_dir: Path,
        port: int = 0,
        startup_timeout_s: float = 60.0,
        command: Sequence[str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        """``port``: the port to listen on; 0 picks a free one.

        ``command`` replaces ``python -m forage serve``; the index and ``--host H --port P`` are
        appended to it. ``log_path``: where its output is written.
        """
        self._index_dir = index_dir
        self._startup_timeout_s = startup_timeout_s
        self._command = tuple(command or (sys.executable, "-P", "-m", "forage", "serve"))
        self._log_path = log_path
        self._process: ChildProcess | None = None
        self.port = port

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def __enter__(self) -> Self:
        """Starts the server and waits until it is ready; raises ``UserError`` with its output."""
        # Bind first, so that another program on this port is not mistaken for our server.
        with bind_port(_HOST, self.port) as free:
            self.port = free.getsockname()[1]
        server = [*self._command, str(self._index_dir), "--host", _HOST, "--port", str(self.port)]
        self._process = ChildProcess("the search server", server, self._log_path)
        try:
            self._process.start()
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops the server; calling it again does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _wait_until_ready(self, process: ChildProcess) -> None:
        deadline = time.monotonic() + self._startup_timeout_s
        while not _is_ready(self.url):
            if process.status is not None:
                raise UserError(
                    f"the search server exited with {process.status}:\n{process.last_words()}"
                )
            if time.monotonic() >= deadline:
                raise UserError(
                    f"the search server was not ready after {self._startup_timeout_s:g} s; "
                    f"its last output:\n{process.last_words()}"
                )
            time.sleep(_POLL_S)


def _is_ready(url: str) -> bool:
    # Ignore the environment's proxies: the server is always on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/readyz", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False

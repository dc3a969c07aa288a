"""A search server as a child process: started, waited for, and gone when we are.

For commands that need a server only while they run (the demo, tests). The child has a process
group of its own, so a Ctrl-C in the terminal reaches us and not it; and the kernel ends it if we
are killed without a chance to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from forage.errors import UserError
from forage.retrieval.serve.port import bind_port

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_STOP_S = 15.0
_POLL_S = 0.05
_TAIL_LINES = 20

# Runs between us and the server: asks the kernel to end it with its parent, then becomes it. Python
# code in a forked child (preexec_fn) could deadlock on a lock that another of our threads held.
_DIE_WITH_PARENT = """
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent process has gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ServerProcess:
    """``with ServerProcess(index_dir) as server: ... server.url``.

    Enter it on a thread that lives as long as the server is wanted: the kernel ties the child to
    the thread that started it.
    """

    def __init__(
        self,
        index_dir: Path,
        port: int = 0,
        startup_timeout_s: float = 60.0,
        command: Sequence[str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        """``port`` 0 picks a free one.

        ``command`` replaces ``python -m forage serve`` (its own arguments follow: the index,
        ``--host H --port P``); ``log_path`` is where its output is kept.
        """
        self._index_dir = index_dir
        self._startup_timeout_s = startup_timeout_s
        self._command = tuple(command or (sys.executable, "-m", "forage", "serve"))
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.port = port

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def __enter__(self) -> Self:
        """Start the server and wait until it is ready; raises ``UserError`` with its last words."""
        # Ask first, so that another program on this port is not mistaken for our server.
        with bind_port(_HOST, self.port) as free:
            self.port = free.getsockname()[1]
        self._log = self._open_log()
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL if it takes too long; harmless when repeated."""
        process, self._process = self._process, None
        if process is not None:
            try:
                _signal_group(process, signal.SIGTERM)
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                logger.warning("the search server did not stop within %g s; killed", _STOP_S)
            finally:
                _signal_group(process, signal.SIGKILL)
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _start(self) -> None:
        server = [*self._command, str(self._index_dir), "--host", _HOST, "--port", str(self.port)]
        wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        self._process = subprocess.Popen(
            [*wrapper, *server],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait_until_ready(self) -> None:
        assert self._process is not None, "the server has not been started"
        deadline = time.monotonic() + self._startup_timeout_s
        while not _is_ready(self.url):
            status = self._process.poll()
            if status is not None:
                raise UserError(f"the search server ended with status {status}:\n{self._tail()}")
            if time.monotonic() >= deadline:
                raise UserError(
                    f"the search server was not ready after {self._startup_timeout_s:g} s; "
                    f"its last words:\n{self._tail()}"
                )
            time.sleep(_POLL_S)

    def _open_log(self) -> IO[bytes]:
        if self._log_path is None:
            return tempfile.TemporaryFile()
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            return self._log_path.open("w+b")
        except OSError as error:
            raise UserError(f"cannot write {self._log_path}: {error.strerror}") from error

    def _tail(self) -> str:
        """The last lines of the server's log."""
        assert self._log is not None, "the log is open while the server runs"
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:]) or "(it said nothing)"


def _is_ready(url: str) -> bool:
    # Without the proxies of the environment: this is always our own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/readyz", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _signal_group(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signal the server and whatever it started (its group has its id)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)

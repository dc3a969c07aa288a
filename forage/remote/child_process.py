"""Runs a server as a child process that ends when this process does.

The child has its own process group, so Ctrl-C in the terminal reaches only this process; the kernel
ends the child if this process is killed. The caller knows when the server is ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from forage.errors import UserError

logger = logging.getLogger(__name__)

_STOP_S = 15.0
_TAIL_LINES = 20

# Runs between this process and the server: it asks the kernel to end it with its parent, starts a
# watcher, and becomes the server. Python code in a forked child (preexec_fn) could deadlock on a
# lock held by another thread. The watcher ends the server's group once the server is gone: a killed
# model server once left its engine running and the device full.
_DIE_WITH_PARENT = """
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent process has gone")
    server = os.getpid()
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        os.closerange(0, 256)
        libc.prctl(1, signal.SIGUSR1)
        if os.getppid() == server:
            signal.sigwait([signal.SIGUSR1])
        os.killpg(server, signal.SIGKILL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A process and its log; start it on a thread that lives as long as the process should.

    The kernel ties the child to the thread that started it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``name``: for messages. ``environment``: all of the child's variables; None: ours."""
        self._name = name
        self._command = tuple(command)
        self._log_path = log_path
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id, which is also its group's id."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status; None while it is running."""
        assert self._process is not None, "the server has not been started"
        return self._process.poll()

    def start(self) -> None:
        """Starts the process; raises ``UserError`` if its log cannot be written."""
        self._log = self._open_log()
        wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        self._process = subprocess.Popen(
            [*wrapper, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Ends the process: SIGTERM, then SIGKILL if it takes too long; may be called again."""
        process, self._process = self._process, None
        if process is not None:
            try:
                _signal_group(process, signal.SIGTERM)
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not stop within %g s; killed", self._name, _STOP_S)
            finally:
                _signal_group(process, signal.SIGKILL)
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def last_words(self) -> str:
        """The last lines of its log."""
        assert self._log is not None, "the log is open while the server runs"
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:]) or "(no output)"

    def _open_log(self) -> IO[bytes]:
        if self._log_path is None:
            return tempfile.TemporaryFile()
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            return self._log_path.open("w+b")
        except OSError as error:
            raise UserError(f"cannot write {self._log_path}: {error.strerror}") from error


def _signal_group(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signals the process and everything it started (its group has its id)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)

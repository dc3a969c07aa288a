"""One side of a comparison: a program in a separate process, so that settings do not leak.

The process gets none of the caller's variables for threads and kernels, only those of its side.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.anchors.figure import SideRecord
from forage.hardware import die_with_parent

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".anchors"
_CLEARED = ("GOMP_", "KMP_", "MKL_", "NUMBA_", "NVPL_", "OMP_", "OPENBLAS_", "TORCH_", "VLLM_")
_END_S = 20.0


class MissingSideError(Exception):
    """A side's package is not installed, or this machine cannot run it."""


@dataclass(frozen=True, slots=True)
class Side:
    """A program to time: ``work`` is its function, ``settings`` what the page says about it.

    ``packages`` are those whose versions the page names; without one of them the side is missing.
    ``program`` is the environment: Forage's, or that of ``make anchors`` if it exists.
    """

    name: str
    work: str
    settings: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    program: Literal["forage", "anchors"] = "anchors"

    @property
    def python(self) -> str:
        own = ENVIRONMENT / "bin" / "python"
        return str(own) if self.program == "anchors" and own.exists() else sys.executable


@dataclass(slots=True)
class OpenSide:
    """A side whose process is ready."""

    side: Side
    record: SideRecord
    pid: int
    _requests: IO[str]
    _replies: IO[str]
    _log: Path

    def round(self, request: Mapping[str, Any]) -> dict[str, float]:
        """One round of work; returns its figures by name."""
        self._requests.write(json.dumps(dict(request)) + "\n")
        self._requests.flush()
        return _read(self._replies, self.side, self._log)["values"]


@contextmanager
def opened(side: Side, folder: Path) -> Iterator[OpenSide]:
    """Starts the process and waits until it is ready; raises ``MissingSideError``.

    Its output is written to ``folder/logs``.
    """
    log = folder / "logs" / f"{side.name.replace(' ', '-').replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    arguments = [json.dumps(list(side.packages)), json.dumps(dict(side.arguments))]
    command = [side.python, "-m", "benchmarks.anchors.child", side.work, *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(theirs_in), str(theirs_out)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=_environment(side),
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        with os.fdopen(ours_out, "w") as requests, os.fdopen(ours_in) as replies:
            versions = _read(replies, side, log)["versions"]
            found = _read(replies, side, log)["ready"]
            record = SideRecord(side.name, side.settings, found, versions)
            yield OpenSide(side, record, process.pid, requests, replies, log)
    finally:
        _end(process)


def _environment(side: Side) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_CLEARED)}
    kept |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}", "HF_HUB_OFFLINE": "1"}
    return kept | {"TOKENIZERS_PARALLELISM": "false"} | dict(side.variables)


def _read(replies: IO[str], side: Side, log: Path) -> dict[str, Any]:
    """The next message; raises ``MissingSideError``, or ``RuntimeError`` if the process ended."""
    line = replies.readline()
    if not line:
        words = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        raise RuntimeError(f"{side.name} ended early:\n" + "\n".join(words))
    message = json.loads(line)
    if "missing" in message:
        raise MissingSideError(message["missing"])
    return message


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end, which the closed pipe asks for, and kills the group if it does not come.

    The group also holds servers that the process started.
    """
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):  # all of them ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def has_environment() -> bool:
    return (ENVIRONMENT / "bin" / "python").exists()


def emptied(folder: Path) -> Path:
    """The folder, new and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder

"""Two machines on one: network namespaces with a cable between them, and a Ray over both.

Each has a separate loopback, so that listening or connecting at a wrong address fails. Processes
and files are shared, as on a cluster with a shared file system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

RAY = Path(sys.executable).parent / "ray"
_PORT = 6380
_START_S = 120.0


@dataclass(frozen=True)
class Machine:
    """A namespace, and its address on the cable."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def has(self, process: psutil.Process) -> bool:
        """Whether a process exists."""
        mine = Path("/var/run/netns", self.name).stat().st_ino
        return Path(f"/proc/{process.pid}/ns/net").stat().st_ino == mine


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Skips if they cannot be created, which requires root and iproute2."""
    names = [f"forage{os.getpid()}{end}" for end in "ab"]
    first, second = (Machine(name, f"10.77.0.{n}") for n, name in enumerate(names, 1))
    cable = [f"fo{os.getpid() % 10**8}{end}" for end in "ab"]
    with ExitStack() as stack:
        for machine in (first, second):
            _ip("netns", "add", machine.name)
            stack.callback(_ip, "netns", "del", machine.name)
        _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for machine, end in zip((first, second), cable, strict=True):
            _ip("link", "set", end, "netns", machine.name)
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", end)
            for link in (end, "lo"):
                _ip("-n", machine.name, "link", "set", link, "up")
        yield first, second


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"").decode()
        pytest.skip(f"ip {' '.join(arguments)}: {error} {detail}")


@contextmanager
def ray_over(machines: Sequence[Machine], num_cpus: Sequence[int]) -> Iterator[str]:
    """A Ray with this many CPUs on each machine; gives its address."""
    head = machines[0]
    folder, address = Path(f"/tmp/f-{os.getpid()}"), f"{head.address}:{_PORT}"
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    started: list[subprocess.Popen[bytes]] = []
    log = folder.with_suffix(".log")
    try:
        with log.open("wb") as out:
            for machine, number in zip(machines, num_cpus, strict=True):
                where = [f"--address={address}"]
                if machine is head:
                    where = ["--head", f"--port={_PORT}", f"--temp-dir={folder}"]
                    where += ["--include-dashboard=false"]
                command = [str(RAY), "start", *where, f"--num-cpus={number}", "--num-gpus=0"]
                command += [f"--node-ip-address={machine.address}", "--disable-usage-stats"]
                started.append(
                    subprocess.Popen(
                        machine.command(*command, "--block"),
                        stdout=out,
                        stderr=out,
                        env=environment,
                    )
                )
                _wait_for(log, started, len(started))
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(log: Path, started: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Waits until this many processes have reported that Ray is running."""
    deadline = time.monotonic() + _START_S
    while log.read_text().count("Ray runtime started.") < number:
        if time.monotonic() > deadline or any(p.poll() is not None for p in started):
            pytest.skip(f"Ray does not start here: {log.read_text()[-500:]}")
        time.sleep(0.2)

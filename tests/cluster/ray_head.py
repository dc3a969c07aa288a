"""A Ray with two CPUs and four fictitious GPUs, for the tests of placement."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from forage.retrieval.serve.port import bind_port

RAY = Path(sys.executable).parent / "ray"
_MAX_STARTS = 4  # Ray gives its own processes 30 s, which can be too short on busy cores
ENVIRONMENT = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}


def free_port() -> int:
    with bind_port("127.0.0.1", 0) as free:
        return free.getsockname()[1]


@cache
def ray_address() -> str:
    """The address of Ray, which ends with the tests."""
    address, head = start_head(Path(f"/tmp/forage-ray-{os.getpid()}"), ENVIRONMENT)
    atexit.register(head.wait)
    atexit.register(head.terminate)
    return address


def start_head(folder: Path, environment: dict[str, str]) -> tuple[str, subprocess.Popen[bytes]]:
    """A Ray's address and its process, which the caller must end.

    The folder's name is short because paths of sockets in it are limited to 107 bytes.
    """
    command = [str(RAY), "start", "--head", "--port=0", "--num-cpus=2", "--num-gpus=4", "--block"]
    command += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    log = folder.with_suffix(".log")
    # Ray waits only 15 s for agents to choose their ports, which can be too short on busy cores.
    agents = (
        "dashboard-agent-grpc",
        "dashboard-agent-listen",
        "metrics-export",
        "runtime-env-agent",
    )
    command += [f"--{agent}-port={free_port()}" for agent in agents]
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(log.unlink, missing_ok=True)
    for _ in range(_MAX_STARTS):
        with log.open("w") as out:
            head = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        while head.poll() is None:
            if found := re.search(r"--address='([^']+)'", log.read_text()):
                return found[1], head
            time.sleep(0.1)
    pytest.skip(f"Ray does not start here: {log.read_text()[-500:]}")

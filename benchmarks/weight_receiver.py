"""A publish to a process that receives weights like a server's worker and discards them.

``gpu.py`` and ``ranks.py`` measure it. Loading the weights into a server's model is not included.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from subprocess import PIPE, Popen
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from forage.rollout.engines.servers.engine_server import JoinInfo
from forage.rollout.engines.servers.sender_group import GroupPlan, name_gpu, why_not_nccl

if TYPE_CHECKING:  # importing it would double the time that the process takes to start
    from forage.rollout.engines.servers.weight_transports import Sender

TIMEOUT_S = 300.0


@contextmanager
def publishing(sender: Sender, device: torch.device) -> Iterator[tuple[Callable[[], int], str]]:
    """A publish to a new process with ``device``, and its transport: NCCL or gloo.

    The publish ends when everything has been received, and returns the number of bytes.
    """
    members = {"the sender": sender.gpu(), "the receiver": name_gpu(device)}
    by_nccl = why_not_nccl(members) is None
    (info,) = sender.open_group(GroupPlan(("http://127.0.0.1:9",), (1,), by_nccl, TIMEOUT_S))
    command = [sys.executable, __file__, json.dumps(asdict(info)), str(device)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _raise(sender.join())
            publish = _Publish(sender, process.stdin, process.stdout)
            yield publish, "NCCL, to another GPU" if by_nccl else "gloo, through host memory"
            process.stdin.close()
            process.wait(TIMEOUT_S)
        finally:
            process.kill()


class _Publish:
    """Announces each bucket, sends it, and waits until it is acknowledged."""

    def __init__(self, sender: Sender, announced: IO[str], received: IO[str]) -> None:
        self._sender, self._announced, self._received = sender, announced, received

    def __call__(self) -> int:
        num_bytes = 0
        self._sender.begin()
        while (bucket := self._sender.next_bucket()) is not None:
            print(bucket.num_bytes, file=self._announced, flush=True)
            _raise(self._sender.send())
            num_bytes += int(self._received.readline())
        return num_bytes


def _raise(why: str | None) -> None:
    if why is not None:
        raise RuntimeError(why)


def _receive(info: JoinInfo, device: torch.device) -> None:
    """Joins the sender's group, meets it with a byte, then receives buckets of sizes from stdin."""
    patience = timedelta(seconds=info.timeout_s)
    store = TCPStore(info.address, info.port, is_master=False, timeout=patience)
    group: Any
    if info.backend == "nccl":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        group = dist.ProcessGroupNCCL(store, info.rank_offset, info.world_size, options)
    else:
        device = torch.device("cpu")
        group = dist.ProcessGroupGloo(store, info.rank_offset, info.world_size, patience)
    group.broadcast([_room(1, device)], dist.BroadcastOptions()).wait()
    for size in map(int, sys.stdin):
        group.broadcast([_room(size, device)], dist.BroadcastOptions()).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        print(size, flush=True)


def _room(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


if __name__ == "__main__":
    _receive(JoinInfo(**json.loads(sys.argv[1])), torch.device(sys.argv[2]))

"""The trainer's place in a torch process group with the workers of servers.

The group is one of torch's own, beside whatever groups the trainer has: of NCCL where each member
has a GPU to itself, of gloo, and so through host memory, elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.cuda import nccl

from forage.hardware import address_towards
from forage.retrieval.serve.port import bind_port
from forage.rollout.engines.servers.engine_server import JoinInfo

_RAISES = "TORCH_NCCL_BLOCKING_WAIT"


def name_gpu(device: torch.device) -> list[str]:
    """The GPU, and NCCL's version there; nothing for a CPU. A server's workers say the same."""
    if device.type != "cuda":
        return []
    version = ".".join(map(str, nccl.version()))
    return [str(torch.cuda.get_device_properties(device).uuid), version]


def nccl_joins(members: Sequence[Sequence[str]]) -> bool:
    """Whether NCCL makes a group of members that ``name_gpu`` has named.

    It refuses two of them on one GPU, and a CPU, and members of two versions cannot talk.
    """
    if not all(members):
        return False
    gpus, versions = zip(*members, strict=True)
    return len(set(gpus)) == len(gpus) and len(set(versions)) == 1


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Whose workers are to be in a group with the sender, and how they meet."""

    urls: tuple[str, ...]
    """Of the servers."""
    num_workers: tuple[int, ...]
    """Of each server."""
    by_nccl: bool
    """Whether NCCL makes it, and not gloo."""
    timeout_s: float
    """For the joining, and for each bucket."""
    name: str | None = None
    """That of a group which the workers make as torch does; see ``_as_torch_does``."""


class SenderGroup:
    """Rank 0 of a group with the workers of some servers.

    ``infos`` go to the servers, which must join while ``join`` runs on a thread of its own.
    """

    def __init__(self, plan: GroupPlan, device: torch.device) -> None:
        """``device``: what is sent from, if NCCL sends."""
        self.device = device if plan.by_nccl else torch.device("cpu")
        self.name = plan.name
        self._timeout = timedelta(seconds=plan.timeout_s)
        addresses = [_towards(url) for url in plan.urls]
        # One address is that of all servers, often loopback's: nobody else reaches the store.
        host = addresses[0] if len(set(addresses)) == 1 else "0.0.0.0"
        listener = bind_port(host, 0)
        port = listener.getsockname()[1]
        self._address = max(set(addresses), key=lambda each: not each.startswith("127."))
        self._store = TCPStore(
            *(host, port),
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._world_size = 1 + sum(plan.num_workers)
        self._group: Any = None
        backend = "nccl" if plan.by_nccl else "gloo"
        self.infos: list[JoinInfo] = []
        for place, address in enumerate(addresses):
            offset = 1 + sum(plan.num_workers[:place])
            self.infos.append(
                JoinInfo(address, port, offset, self._world_size, backend, plan.timeout_s)
            )

    def join(self) -> None:
        """Make the group, once all are there, and meet in it by a byte that is sent.

        Raises ``RuntimeError`` after the deadline.
        """
        store: Store = self._store
        if self.name is not None:
            store = _as_torch_does(store, self.name, self.device.type)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            with _failures_are_raised():
                self._group = dist.ProcessGroupNCCL(store, 0, self._world_size, options)
        else:
            # By itself gloo listens at what the machine's name means, often loopback's address.
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._address)]
            options._timeout = self._timeout
            self._group = gloo(store, 0, self._world_size, options)
        if self.name is None:  # a group that torch makes sends nothing by itself
            self.send([torch.zeros(1, dtype=torch.uint8, device=self.device)])

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast a bucket; raises ``RuntimeError`` where a server is gone or too slow."""
        if self.device.type == "cpu":
            self._broadcast(tensors)
            return
        # NCCL connects in the first broadcast, and waits there without a deadline.
        failures: list[RuntimeError | None] = []

        def work() -> None:
            torch.cuda.set_device(self.device)  # a thread begins on the first GPU
            try:
                self._broadcast(tensors)
            except RuntimeError as error:
                failures.append(error)
            else:
                failures.append(None)

        thread = threading.Thread(target=work, name="broadcast", daemon=True)
        thread.start()
        thread.join(2 * self._timeout.total_seconds())
        if not failures:
            raise RuntimeError("NCCL has not begun in time: a server is gone, or has not joined")
        if failures[0] is not None:
            raise failures[0]

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        ends_at = time.monotonic() + self._timeout.total_seconds()
        options = dist.BroadcastOptions()
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            # Never 0, which is no deadline.
            work.wait(timedelta(seconds=max(ends_at - time.monotonic(), 0.001)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _failures_are_raised() -> Iterator[None]:
    """A group of NCCL made meanwhile raises what fails; by itself it ends the process for it.

    torch reads this when it makes a group, and has no other way to say it.
    """
    before = os.environ.get(_RAISES)
    os.environ[_RAISES] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_RAISES]
        else:
            os.environ[_RAISES] = before


def _as_torch_does(store: Store, name: str, device_type: str) -> Store:
    """Where the members of a group meet that is made by torch's own helper, under this name.

    SGLang's workers make theirs with a copy of torch's ``init_process_group``: it prefixes the
    store by the name, and ``_new_process_group_helper`` again by the name and by the first device
    of the backend. The helper is not called here: it enters the group among those of this process,
    where no other may have its name, and could split it from the trainer's own.
    """
    for prefix in (name, f"{name}/", f"{device_type}/"):
        store = PrefixStore(prefix, store)
    return store


def _towards(url: str) -> str:
    """This machine's address as the server at ``url`` sees it."""
    parts = urlsplit(url)
    return address_towards(parts.hostname or "127.0.0.1", parts.port or 80)

"""The trainer's side of a torch process group with the workers of servers.

The group is independent of the trainer's other groups. It uses NCCL if each member has its own GPU,
otherwise gloo, through host memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
    """The GPU's id and NCCL's version, in the format of a server's workers; empty for a CPU."""
    if device.type != "cuda":
        return []
    version = ".".join(map(str, nccl.version()))
    return [str(torch.cuda.get_device_properties(device).uuid), version]


def why_not_nccl(members: Mapping[str, Sequence[str]]) -> str | None:
    """Why NCCL cannot connect members that ``name_gpu`` describes, or None if it can.

    It cannot connect two members on one GPU, a CPU, or members with different NCCL versions.
    ``members`` has a description by the member's name.
    """
    by_gpu: dict[str, str] = {}
    by_version: dict[str, str] = {}
    for name, about in members.items():
        if not about:
            return f"{name} computes on a CPU"
        gpu, version = about
        if (other := by_gpu.setdefault(gpu, name)) != name:
            return f"{other} and {name} share a GPU"
        by_version.setdefault(version, name)
    if len(by_version) > 1:
        versions = (f"{name} has NCCL {version}" for version, name in by_version.items())
        return f"{' and '.join(versions)}: install the same version in both environments"
    return None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of a sender's group: which servers' workers join it, and how."""

    urls: tuple[str, ...]
    num_workers: tuple[int, ...]
    """The number of workers of each server."""
    by_nccl: bool
    """Whether to use NCCL instead of gloo."""
    timeout_s: float
    """The timeout for joining, and for each bucket."""
    name: str | None = None
    """The group's name if the workers create it with torch's helper; see ``_as_torch_does``."""


class SenderGroup:
    """Rank 0 of a group with the workers of some servers.

    Send ``infos`` to the servers, which must join while ``join`` runs on another thread.
    """

    def __init__(self, plan: GroupPlan, device: torch.device) -> None:
        """``device`` is the device that NCCL sends from."""
        self.device = device if plan.by_nccl else torch.device("cpu")
        self.name = plan.name
        self._timeout = timedelta(seconds=plan.timeout_s)
        addresses = [_towards(url) for url in plan.urls]
        # If all servers see one address, often loopback, listen only there.
        host = addresses[0] if len(set(addresses)) == 1 else "0.0.0.0"
        listener = bind_port(host, 0)
        port = listener.getsockname()[1]
        self._address = max(set(addresses), key=lambda each: not each.startswith("127."))
        self._store = TCPStore(
            host,
            port,
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
        """Creates the group once all members have joined, and tests it with one byte.

        Raises ``RuntimeError`` after the timeout.
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
            # By default gloo listens at the address of the machine's name, often loopback.
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._address)]
            options._timeout = self._timeout
            self._group = gloo(store, 0, self._world_size, options)
        if self.name is None:  # torch's helper sends no test byte
            self.send([torch.zeros(1, dtype=torch.uint8, device=self.device)])

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts a bucket; raises ``RuntimeError`` if a server is gone or too slow."""
        if self.device.type == "cpu":
            self._broadcast(tensors)
            return
        # NCCL connects in the first broadcast, and waits there without a timeout.
        failures: list[RuntimeError | None] = []

        def work() -> None:
            torch.cuda.set_device(self.device)  # a thread starts on the first GPU
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
            raise RuntimeError(
                "NCCL did not start within the timeout: a server is gone or has not joined"
            )
        if failures[0] is not None:
            raise failures[0]

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        ends_at = time.monotonic() + self._timeout.total_seconds()
        options = dist.BroadcastOptions()
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            # Never 0, which would mean no timeout.
            work.wait(timedelta(seconds=max(ends_at - time.monotonic(), 0.001)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _failures_are_raised() -> Iterator[None]:
    """Makes NCCL groups created inside this block raise errors instead of aborting the process.

    torch reads the environment variable when it creates a group, and has no other option for it.
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
    """Prefixes the store as torch's own helper does for a group of this name.

    SGLang's workers create theirs with a copy of torch's ``init_process_group``: it prefixes the
    store with the name, and ``_new_process_group_helper`` prefixes it again with the name and with
    the backend's first device. This process does not call the helper, which would register the
    group under a name that must be unique, and could split it from the trainer's group.
    """
    for prefix in (name, f"{name}/", f"{device_type}/"):
        store = PrefixStore(prefix, store)
    return store


def _towards(url: str) -> str:
    """This machine's address as the server at ``url`` sees it."""
    parts = urlsplit(url)
    return address_towards(parts.hostname or "127.0.0.1", parts.port or 80)

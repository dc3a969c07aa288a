"""The trainer's place in a torch process group with the workers of servers.

The group is one of torch's own, beside whatever groups the trainer has: of NCCL where each member
has a GPU to itself, of gloo, and so through host memory, elsewhere.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.cuda import nccl

from forage.retrieval.serve.port import bind_port
from forage.rollout.engines.engine_server import JoinInfo


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


class SenderGroup:
    """Rank 0 of a group with the workers of some servers.

    ``infos`` go to the servers, which must join while ``join`` runs on a thread of its own.
    """

    def __init__(
        self,
        urls: Sequence[str],
        num_workers: Sequence[int],
        device: torch.device,
        timeout_s: float,
        name: str | None = None,
    ) -> None:
        """``num_workers``: of each server; ``timeout_s`` is for the joining and each bucket.

        ``name``: that of a group which the workers make as torch does; see ``_as_torch_does``.
        """
        self.device = device
        self.name = name
        self._timeout = timedelta(seconds=timeout_s)
        addresses = [_address_towards(url) for url in urls]
        # One address is that of all servers, often loopback's: nobody else reaches the store.
        host = addresses[0] if len(set(addresses)) == 1 else "0.0.0.0"
        listener = bind_port(host, 0)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            *(host, port),
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._world_size = 1 + sum(num_workers)
        self._group: Any = None
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.infos: list[JoinInfo] = []
        for place, address in enumerate(addresses):
            offset = 1 + sum(num_workers[:place])
            self.infos.append(JoinInfo(address, port, offset, self._world_size, backend, timeout_s))

    def join(self) -> None:
        """Make the group, once all are there; raises ``RuntimeError`` after the deadline."""
        store: Store = self._store
        if self.name is not None:
            store = _as_torch_does(store, self.name, self.device.type)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(store, 0, self._world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, 0, self._world_size, self._timeout)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast a bucket; raises ``RuntimeError`` where a server is gone or too slow."""
        ends_at = time.monotonic() + self._timeout.total_seconds()
        options = dist.BroadcastOptions()
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            # Never 0, which is no deadline.
            work.wait(timedelta(seconds=max(ends_at - time.monotonic(), 0.001)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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


def _address_towards(url: str) -> str:
    """This machine's address as the server at ``url`` sees it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # nothing is sent: it only picks the way
        return probe.getsockname()[0]

"""The trainer's end of the group that weights travel through: buckets of bytes, broadcast.

The other end is ``plugins/forage_receiver.py`` in the workers of vLLM. The group is one of torch's
own, beside whatever groups the trainer has: of NCCL where each member has a GPU to itself, of gloo,
and so through host memory, elsewhere.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from forage.retrieval.serve.port import bind_port
from forage.rollout.engines.engine_server import Bucket, JoinInfo, Tensors

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 16  # so that bytes can be read as numbers of any type where they lie

NamedTensor = tuple[str, Tensor]


def tensors_of(weights: Iterable[NamedTensor]) -> Tensors:
    """What ``weights`` are, without their numbers."""
    rows = [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights
    ]
    names, dtypes, shapes = zip(*rows, strict=True)
    return Tensors(names, dtypes, shapes)


def fill_buckets(
    weights: Iterable[NamedTensor], device: torch.device, max_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[Bucket, Tensor]]:
    """The weights in their order, copied into buckets of about ``max_bytes``, with their bytes.

    A tensor is never split: one that is larger has a bucket for itself.
    """
    held: list[NamedTensor] = []
    num_bytes = 0
    for name, tensor in weights:
        size = _aligned(tensor.numel() * tensor.element_size())
        if held and num_bytes + size > max_bytes:
            yield _fill(held, num_bytes, device)
            held, num_bytes = [], 0
        held.append((name, tensor))
        num_bytes += size
    if held:
        yield _fill(held, num_bytes, device)


def _fill(
    weights: Sequence[NamedTensor], num_bytes: int, device: torch.device
) -> tuple[Bucket, Tensor]:
    data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    starts: list[int] = []
    start = 0
    for _, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        flat = tensor.detach().contiguous().view(-1)
        data[start : start + size].view(tensor.dtype).copy_(flat)
        starts.append(start)
        start += _aligned(size)
    return Bucket(tensors_of(weights), tuple(starts), num_bytes), data


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


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
    ) -> None:
        """``num_workers``: of each server; ``timeout_s`` is for the joining and each broadcast."""
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        addresses = [_address_towards(url) for url in urls]
        # One address is that of all servers, often loopback's: nobody else reaches the store.
        host = addresses[0] if len(set(addresses)) == 1 else "0.0.0.0"
        listener = bind_port(host, 0)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
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
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(self._store, 0, self._world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, 0, self._world_size, self._timeout)

    def send(self, data: Tensor) -> None:
        """Broadcast a bucket; raises ``RuntimeError`` where a server is gone or too slow."""
        self._group.broadcast([data], dist.BroadcastOptions()).wait(self._timeout)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _address_towards(url: str) -> str:
    """This machine's address as the server at ``url`` sees it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # nothing is sent: it only picks the way
        return probe.getsockname()[0]

"""The trainer's end of the group that weights travel through: buckets of bytes, broadcast.

The other end is ``plugins/forage_receiver.py`` in the workers of vLLM. The group is one of torch's
own, beside whatever groups the trainer has: of NCCL where each member has a GPU to itself, of gloo,
and so through host memory, elsewhere.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
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
WeightsNow = Callable[[], Iterable[NamedTensor]]
"""The trainer's weights as they are, a tensor at a time, in the same order each time."""


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
    """The weights in their order, copied into buckets of about ``max_bytes``, with their bytes."""
    for held in in_buckets(weights, max_bytes):
        yield _fill(held, _new_bytes(_size_of(held), device))


def in_buckets(
    weights: Iterable[NamedTensor], max_bytes: int = BUCKET_BYTES
) -> Iterator[list[NamedTensor]]:
    """The weights in their order, as many at a time as fill a bucket.

    A tensor is never split: one that is larger has a bucket for itself.
    """
    held: list[NamedTensor] = []
    num_bytes = 0
    for name, tensor in weights:
        size = _aligned(tensor.nbytes)
        if held and num_bytes + size > max_bytes:
            yield held
            held, num_bytes = [], 0
        held.append((name, tensor))
        num_bytes += size
    if held:
        yield held


def _size_of(weights: Sequence[NamedTensor]) -> int:
    return sum(_aligned(tensor.nbytes) for _, tensor in weights)


def _new_bytes(number: int, device: torch.device) -> Tensor:
    return torch.empty(number, dtype=torch.uint8, device=device)


def _fill(weights: Sequence[NamedTensor], data: Tensor) -> tuple[Bucket, Tensor]:
    """``data`` has as many bytes as ``_size_of`` says."""
    starts: list[int] = []
    start = 0
    for _, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        flat = tensor.detach().contiguous().view(-1)
        data[start : start + size].view(tensor.dtype).copy_(flat)
        starts.append(start)
        start += _aligned(size)
    return Bucket(tensors_of(weights), tuple(starts), len(data)), data


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


class WeightSender:
    """Whoever has the weights: says what they are, and sends them; used on threads.

    Ranks that hold the weights in parts have one each, and make the same calls together: all of
    them gather, and the first sends.
    """

    def __init__(
        self,
        weights: WeightsNow,
        device: torch.device,
        shapes: WeightsNow | None = None,
        is_first: bool = True,
    ) -> None:
        """``shapes`` are the weights without numbers; they are sent from ``device``."""
        self._weights = weights
        self._shapes = shapes or weights
        self._device = device
        self._is_first = is_first
        self._group: SenderGroup | None = None
        self._buckets: Iterator[list[NamedTensor]] = iter(())
        self._room: Tensor | None = None
        self._data: Tensor | None = None
        """The bucket to be sent: the first bytes of the room."""

    def tensors(self) -> Tensors:
        """What the weights are."""
        return tensors_of(self._shapes())

    def gpu(self) -> list[str]:
        """As ``name_gpu``, of the first."""
        return name_gpu(self._device)

    def open_group(
        self, urls: Sequence[str], num_workers: Sequence[int], by_nccl: bool, timeout_s: float
    ) -> list[JoinInfo]:
        """Prepare a group with the workers of servers (``SenderGroup``); ``join`` makes it."""
        self._group = None
        if not self._is_first:
            return []
        device = self._device if by_nccl else torch.device("cpu")
        self._group = SenderGroup(urls, num_workers, device, timeout_s)
        return self._group.infos

    def join(self) -> str | None:
        """Make the group, once all are there; gives the reason where none was made in time."""
        return self._in_group(lambda group: group.join())

    def begin(self) -> None:
        """The next bucket is the first."""
        self._buckets = in_buckets(self._weights())

    def next_bucket(self) -> Bucket | None:
        """Gather and fill the next bucket, to be sent; None after the last."""
        self._data = None
        held = next(self._buckets, None)
        if held is None or self._group is None:
            self._room = None
            return None
        size, device = _size_of(held), self._group.device
        if self._room is None or len(self._room) < size or self._room.device != device:
            self._room = _new_bytes(size, device)
        bucket, self._data = _fill(held, self._room[:size])
        return bucket

    def send(self) -> str | None:
        """Broadcast the bucket; gives the reason where a server is gone or too slow."""
        data = self._data
        return self._in_group(lambda group: None if data is None else group.send(data))

    def _in_group(self, work: Callable[[SenderGroup], None]) -> str | None:
        """A failure of the servers is told, not raised: it would end the ranks."""
        if self._group is None:
            return None
        try:
            work(self._group)
        except RuntimeError as error:
            return str(error)
        return None


def _address_towards(url: str) -> str:
    """This machine's address as the server at ``url`` sees it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # nothing is sent: it only picks the way
        return probe.getsockname()[0]

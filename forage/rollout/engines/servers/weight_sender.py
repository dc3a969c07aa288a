"""The trainer's end of the way of weights through a group: buckets, broadcast.

The other end is ``plugins/forage_receiver.py`` in the workers of vLLM, which takes a bucket as a
run of bytes, or the workers of SGLang, which take its tensors one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from forage.rollout.engines.servers.engine_server import Bucket, JoinInfo, Tensors
from forage.rollout.engines.servers.sender_group import GroupPlan, SenderGroup, name_gpu

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


def _tensors_in(bucket: Bucket, data: Tensor) -> list[Tensor]:
    """The tensors of a filled bucket, where they lie."""
    rows = zip(bucket.tensors.dtypes, bucket.tensors.shapes, bucket.starts, strict=True)
    tensors: list[Tensor] = []
    for dtype_name, shape, start in rows:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(data[start : start + size].view(dtype).view(shape))
    return tensors


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


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
        dtype: torch.dtype | None = None,
    ) -> None:
        """``shapes`` are the weights without numbers; they are sent from ``device``.

        ``dtype``: the servers'; None: as the weights are. To send more would be in vain.
        """
        self._weights = weights
        self._shapes = shapes or weights
        self._device = device
        self._is_first = is_first
        self._dtype = dtype
        self._group: SenderGroup | None = None
        self._buckets: Iterator[list[NamedTensor]] = iter(())
        self._room: Tensor | None = None
        self._sent: list[Tensor] = []
        """What is sent of the bucket: all its bytes, which are the first of the room, or each
        tensor in them."""

    def tensors(self) -> Tensors:
        """What the weights are."""
        return tensors_of(self._typed(self._shapes()))

    def gpu(self) -> list[str]:
        """As ``name_gpu``, of the first."""
        return name_gpu(self._device)

    def open_group(self, plan: GroupPlan) -> list[JoinInfo]:
        """Prepare a group with the workers of servers (``SenderGroup``); ``join`` makes it."""
        self.leave()
        if not self._is_first:
            return []
        self._group = SenderGroup(plan, self._device)
        return self._group.infos

    def join(self) -> str | None:
        """Make the group, once all are there; gives the reason where none was made in time."""
        return self._in_group(lambda group: group.join())

    def leave(self) -> None:
        """Drop the group with its store: a worker that waits in it fails at once.

        SGLang's workers wait as long as torch does by itself, which is half an hour.
        """
        self._group = None

    def begin(self) -> None:
        """The next bucket is the first."""
        self._buckets = in_buckets(self._typed(self._weights()))

    def next_bucket(self) -> Bucket | None:
        """Gather and fill the next bucket, to be sent; None after the last."""
        self._sent = []
        held = next(self._buckets, None)
        if held is None or self._group is None:
            self._room = None
            return None
        size, device = _size_of(held), self._group.device
        if self._room is None or len(self._room) < size or self._room.device != device:
            self._room = _new_bytes(size, device)
        bucket, data = _fill(held, self._room[:size])
        self._sent = [data] if self._group.name is None else _tensors_in(bucket, data)
        return bucket

    def send(self) -> str | None:
        """Broadcast the bucket; gives the reason where a server is gone or too slow."""
        return self._in_group(lambda group: group.send(self._sent))

    def _typed(self, weights: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
        if self._dtype is None:
            return weights
        return ((name, tensor.to(self._dtype)) for name, tensor in weights)

    def _in_group(self, work: Callable[[SenderGroup], None]) -> str | None:
        """A failure of the servers is told, not raised: it would end the ranks."""
        if self._group is None:
            return None
        try:
            work(self._group)
        except RuntimeError as error:
            why = str(error)
        else:
            return None
        self.leave()  # outside of the except, which keeps the group
        return why

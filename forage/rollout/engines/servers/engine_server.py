"""What a server that samples can be asked: one turn, its state, and to take new weights.

``vllm_server.py`` and ``sglang_server.py`` say it in their servers' words; the engine and
``publish.py`` know these methods alone. A method that fails raises ``ServerFailed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from forage.remote.request import RemoteFailure
from forage.types import Completion, EngineError, FailureKind, Sampling

Part = Literal["weights", "kv_cache"]
"""What of a server's memory sleeps and wakes by itself."""


class ServerFailed(EngineError):
    """A server did not do what it was asked for; another one, or the same one later, may."""

    def __init__(self, url: str, doing: str, failure: RemoteFailure) -> None:
        super().__init__(f"{url} failed to {doing}: {failure.detail}")
        self.failure = failure

    @classmethod
    def for_good(cls, url: str, doing: str, why: str) -> ServerFailed:
        """Of a server that did something else than it was asked for: the next try is in vain."""
        return cls(url, doing, RemoteFailure(FailureKind.MALFORMED, why, may_pass=False))


class TurnAborted(EngineError):
    """The server gave up a turn because it was told to: the turn is to be sampled again."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """What an update brings: names, types as torch spells them ("float32") and shapes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


Columns = dict[str, list[float]]
"""By which the base of adapters is known: how the first columns of some linear layers begin."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors as one run of bytes; ``starts`` are their places in it."""

    tensors: Tensors
    starts: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class JoinInfo:
    """How a server's workers join the trainer's group; ``rank_offset`` is the first one's rank."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_s: float


class EngineServer(Protocol):
    """One server; an update is ``pause``, then weights by either way, then ``resume``.

    Through a group: ``join`` once, then ``start_update``, ``receive`` for each bucket, and
    ``finish_update``; or ``abandon_update``, which ends an update that will not go on.
    """

    url: str
    group_name: str | None
    """Under which name its workers make a group, as torch does, and receive tensor by tensor.

    None: Forage's receiver, whose group has no name and takes the bytes of a bucket at once.
    """

    async def sample(self, token_ids: Sequence[int], sampling: Sampling, salt: str) -> Completion:
        """Sample one turn.

        Raises ``ServerFailed``, ``TurnAborted``, ``ContextOverflow``, and ``EngineError`` for a
        request that no server would take.
        """
        ...

    async def logprobs_of(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """The log-probability of each token of a text but the first, at temperature 1."""
        ...

    async def is_alive(self) -> bool:
        """Whether it answers, and says that it is well, within some seconds."""
        ...

    async def version(self) -> str:
        """The version of its weights, as it was told at their update."""
        ...

    async def pause(self) -> None:
        """Sample nothing until ``resume``; turns in flight go on then."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Give the GPU's memory back until both parts are woken; turns in flight are aborted."""
        ...

    async def wake(self, part: Part) -> None:
        """Take the memory of a part again; its content is lost."""
        ...

    async def forget_keys(self) -> None:
        """Keys and values of older weights go; turns in flight compute theirs anew."""
        ...

    async def load_from_disk(self, folder: Path, version: str) -> None:
        """Take the weights of a Hugging Face folder."""
        ...

    async def num_workers(self) -> int:
        """Processes that hold a part of the weights: its ranks in the trainer's group."""
        ...

    async def gpus(self) -> list[list[str]]:
        """The GPU of each worker and NCCL's version there, as far as the server names them."""
        ...

    async def misfits(self, tensors: Tensors) -> list[str]:
        """Why these tensors are not those of the served model, as far as the server compares."""
        ...

    async def join(self, info: JoinInfo) -> None:
        """Join the trainer's group, which the trainer makes at the same time."""
        ...

    async def start_update(self) -> None: ...

    async def receive(self, bucket: Bucket) -> None:
        """Take a bucket, which the trainer broadcasts at the same time."""
        ...

    async def finish_update(self, version: str) -> None: ...

    async def abandon_update(self) -> None:
        """End an update that will not go on; fails where the server does not answer."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where servers are, and whom to tell that one has failed."""

    urls: tuple[str, ...]
    on_failed: Callable[[str], None] = lambda url: None

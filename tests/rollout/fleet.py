"""Servers that a test updates together: their pool, and an update that only brings a version."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from forage.rollout.engines.servers.server_pool import Member, ServerPool
from forage.rollout.engines.servers.vllm_server import VllmServer
from forage.rollout.engines.servers.weight_check import WeightCheck
from forage.rollout.engines.servers.weight_update import ServerUpdates, each
from tests.rollout.policy_server import PolicyServer, counted_logprobs

TEXT_IDS, BOUND = tuple(range(3, 19)), 1e-3


class Fleet:
    """Servers, their pool, and updates that bring a version and nothing else."""

    def __init__(
        self, *servers: PolicyServer, recomputes: bool = True, sleeps: bool = False
    ) -> None:
        self.failed: list[str] = []
        self.pool = ServerPool(
            [VllmServer(server.url, 5.0, 2.0, 8) for server in servers], 5.0, self.failed.append
        )
        self.check = WeightCheck(TEXT_IDS, counted_logprobs, bound=BOUND)
        self.updates = ServerUpdates(self.pool, self, recomputes, sleeps, self.check)
        self.brought: list[tuple[str, ...]] = []

    async def bring(self, members: Sequence[Member], version: str) -> None:
        self.brought.append(tuple(member.server.url for member in members))
        await each(members, lambda server: self._finish(server, version))

    async def _finish(self, server: object, version: str) -> None:
        assert isinstance(server, VllmServer)
        await server.start_update()
        await server.finish_update(version)

    async def publish(self, version: int) -> None:
        async with self.updates.updating(lambda: version):
            pass

    @property
    def serving(self) -> list[str]:
        return [member.server.url for member in self.pool.serving]


@asynccontextmanager
async def fleet(
    *servers: PolicyServer, recomputes: bool = True, sleeps: bool = False
) -> AsyncIterator[Fleet]:
    it = Fleet(*servers, recomputes=recomputes, sleeps=sleeps)
    try:
        yield it
    finally:
        for member in it.pool.members:
            await member.server.close()

"""Updates of several servers, over real HTTP: order, failures on the way, late servers."""

import asyncio
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from safetensors.torch import save_file

from forage.errors import PartLostError, UserError
from forage.rollout.engines import weight_sender, weight_update
from forage.rollout.engines.engine_http import EngineHttp
from forage.rollout.engines.engine_server import Bucket, ServerFailed, Tensors
from forage.rollout.engines.sender_group import GroupPlan, SenderGroup, nccl_joins
from forage.rollout.engines.server_pool import Member, ServerPool
from forage.rollout.engines.vllm_server import VllmServer
from forage.rollout.engines.weight_sender import WeightSender
from forage.rollout.engines.weight_transports import DiskTransport, GroupTransport
from forage.rollout.engines.weight_update import ServerUpdates, UpdateFailed, each
from tests.rollout.policy_server import PolicyServer, policy_serving


class Fleet:
    """Servers, their pool, and updates that bring a version and nothing else."""

    def __init__(
        self, *servers: PolicyServer, recomputes: bool = True, sleeps: bool = False
    ) -> None:
        self.failed: list[str] = []
        self.pool = ServerPool(
            [VllmServer(server.url, 5.0, 2.0, 8) for server in servers], 5.0, self.failed.append
        )
        self.updates = ServerUpdates(self.pool, self, recomputes, sleeps)
        self.brought: list[tuple[str, ...]] = []

    async def bring(self, members: Sequence[Member], version: str) -> None:
        self.brought.append(tuple(member.server.url for member in members))
        await each(members, lambda server: self._finish(server, version))

    async def _finish(self, server: object, version: str) -> None:
        assert isinstance(server, VllmServer)
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


async def test_a_server_serves_from_its_first_update_on_and_goes_on_after_each():
    with policy_serving(PolicyServer()) as server:
        async with fleet(server, recomputes=False) as it:
            assert it.serving == []
            await it.publish(3)
            assert it.serving == [server.url]
            assert server.version == "3"
            await it.publish(4)
            assert it.pool.num_updates == 2
    once = ["/pause", "/finish_weight_update"]
    # A server of the user's may hold keys of another run: the first update always drops them.
    assert server.notes == [*once, "/reset_prefix_cache", "/resume", *once, "/resume"]


async def test_keys_are_computed_anew_after_each_update_where_that_is_asked():
    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it:
            await it.publish(0)
            await it.publish(1)
    assert server.notes.count("/reset_prefix_cache") == 2


async def test_a_server_that_fails_on_the_way_is_left_out_and_the_others_begin_again():
    with policy_serving(PolicyServer()) as good, policy_serving(PolicyServer()) as bad:
        async with fleet(bad, good) as it:
            bad.broken = "/finish_weight_update"
            await it.publish(0)
            assert it.brought == [(bad.url, good.url), (good.url,)]
            assert (it.serving, it.failed) == ([good.url], [bad.url])
    assert good.notes.count("/resume") == 1, "once, after all are new"
    assert good.notes[-1] == bad.notes[-1] == "/resume"


class GoneAtTheJoin(PolicyServer):
    """It joins no group, and answers nothing afterwards."""

    async def _call(self, request: Request) -> Any:
        if self.broken in self.notes:
            return JSONResponse({"error": "its engine has died"}, 500)
        return await super()._call(request)


async def test_a_server_that_dies_at_the_join_takes_no_other_with_it():
    """The others wait for it in vain, and were left out and started again as well."""
    join = "/init_weight_transfer_engine"
    weights = [("weight", torch.zeros(2))]
    with (
        policy_serving(PolicyServer(broken=join)) as good,
        policy_serving(GoneAtTheJoin(broken=join)) as gone,
    ):
        async with fleet(good, gone) as it:
            transport = GroupTransport(WeightSender(lambda: weights, torch.device("cpu")), 2.0)
            with pytest.raises(UpdateFailed, match="failed to join") as caught:
                await transport.bring(it.pool.members, "0")
            assert [member.server.url for member in caught.value.failures] == [gone.url]
            gone.broken = good.broken = "nothing"
        async with fleet(good) as it:
            good.broken = join
            with pytest.raises(UpdateFailed) as caught:
                await transport.bring(it.pool.members, "0")
            assert [*caught.value.failures] == it.pool.members, "nobody else is to blame"


def test_nccl_joins_those_that_have_a_gpu_to_themselves_and_its_version():
    trainer, same, other, older = (
        ["GPU-a", "2.29.3"],
        ["GPU-a", "2.29.3"],
        ["GPU-b", "2.29.3"],
        ["GPU-c", "2.27.5"],
    )
    assert nccl_joins([trainer, other])
    assert not nccl_joins([trainer, same])
    assert not nccl_joins([trainer, other, same])
    assert not nccl_joins([trainer, older])
    assert not nccl_joins([trainer, []]), "a server that computes on a CPU"
    assert not nccl_joins([[], other]), "a trainer whose ranks have their GPUs to themselves"


@pytest.mark.parametrize(("gpu", "by_nccl"), [("GPU-b", True), ("GPU-a", False)])
async def test_weights_go_through_host_memory_to_a_server_on_the_trainers_gpu(
    gpu: str, by_nccl: bool, monkeypatch: pytest.MonkeyPatch
):
    """NCCL refuses two members on one GPU, which ended every update."""
    plans: list[GroupPlan] = []

    def make(plan: GroupPlan, _: torch.device) -> SenderGroup:
        plans.append(plan)
        raise UserError("seen")

    monkeypatch.setattr(weight_sender, "name_gpu", lambda _: ["GPU-a", "2.29.3"])
    monkeypatch.setattr(weight_sender, "SenderGroup", make)
    weights = [("weight", torch.zeros(2))]
    with policy_serving(PolicyServer(gpu=[gpu, "2.29.3"])) as server:
        async with fleet(server) as it:
            transport = GroupTransport(WeightSender(lambda: weights, torch.device("cuda")), 2.0)
            with pytest.raises(UserError, match="seen"):
                await transport.bring(it.pool.members, "0")
    assert [plan.by_nccl for plan in plans] == [by_nccl]


async def test_updates_that_fail_again_and_again_say_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """It said how often, and no more."""
    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it:

            async def bring(members: Sequence[Member], version: str) -> None:
                raise UpdateFailed({}, "the cable is cut")

            monkeypatch.setattr(it, "bring", bring)
            await it.publish(0)
            assert it.serving == []
    assert "3 updates failed, the last because the cable is cut" in caplog.text


async def test_a_server_that_does_not_say_the_version_serves_no_turn():
    with policy_serving(PolicyServer()) as good, policy_serving(PolicyServer()) as stale:
        async with fleet(stale, good) as it:
            stale.keeps_version = True
            await it.publish(5)
            assert it.serving == [good.url]
            assert it.failed == [stale.url]
    assert stale.notes[-1] == "/resume", "whatever became of the update"


async def test_turns_that_wait_for_a_server_end_where_nobody_has_weights_for_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """A rank died while the only server started again: each second brought an error in the log,
    and the run waited for the server until ``lost_after_s``, ten minutes, with nobody to update it.
    """
    monkeypatch.setattr(weight_update, "_LOOK_AGAIN_S", 0.02)
    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it, it.updates.looking_after():
            await it.publish(0)

            async def bring(members: Sequence[Member], version: str) -> None:
                raise PartLostError("rank 1 has died")

            monkeypatch.setattr(it, "bring", bring)
            it.pool.leave_out(it.pool.members[0], "as if it had failed")
            with pytest.raises(PartLostError, match="rank 1 has died"):
                await it.pool.seat("an episode")
    assert server.notes[-1] == "/resume"


async def test_an_error_with_a_late_server_is_said_and_servers_are_looked_after_still(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """A name that was not resolved for once ended it in silence: no late server served again."""
    monkeypatch.setattr(weight_update, "_LOOK_AGAIN_S", 0.02)
    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it, it.updates.looking_after():
            await it.publish(0)
            bring, failures = it.bring, iter([OSError("no such name")])

            async def bring_later(members: Sequence[Member], version: str) -> None:
                for failure in failures:
                    raise failure
                await bring(members, version)

            monkeypatch.setattr(it, "bring", bring_later)
            it.pool.leave_out(it.pool.members[0], "as if it had failed")
            async with asyncio.timeout(60):
                while not it.serving:
                    await asyncio.sleep(0.01)
    assert "no such name" in caplog.text


async def test_a_server_that_is_gone_is_left_out_and_comes_back_with_the_weights_of_today():
    """It serves no turn in between, whatever it answers itself."""
    with policy_serving(PolicyServer()) as good:
        with policy_serving(PolicyServer()) as gone:
            it = Fleet(good, gone)
            await it.publish(0)
            assert it.serving == [good.url, gone.url]
        port = int(gone.url.rpartition(":")[2])
        await it.publish(1)
        assert it.serving == [good.url]
        assert it.failed == [gone.url]
        async with it.updates.looking_after():
            with policy_serving(PolicyServer(), port) as back:
                async with asyncio.timeout(10):
                    while back.url not in it.serving:
                        await asyncio.sleep(0.02)
                assert back.version == "1"
        assert it.brought[-1] == (gone.url,)
        for member in it.pool.members:
            await member.server.close()


async def test_nothing_is_brought_while_weights_change():
    """A server that comes late waits for the end of an update, and then has its version."""
    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it:
            await it.publish(0)
            async with it.updates.looking_after():
                async with it.updates.updating(lambda: 1):
                    it.pool.leave_out(it.pool.members[0], "for the test")
                    await asyncio.sleep(1.3)
                    assert server.version == "0"
                assert (server.version, it.serving) == ("1", [server.url])
    assert it.brought == [(server.url,)] * 2


async def test_an_episode_that_begins_in_an_update_shares_its_keys_with_nobody(
    monkeypatch: pytest.MonkeyPatch,
):
    """The salt was new before the server was paused: keys of older weights were read under it."""
    with policy_serving(PolicyServer()) as server:
        async with fleet(server, recomputes=False) as it:
            await it.publish(0)
            bring, salts = it.bring, [(await it.pool.seat("a")).salt]

            async def bring_later(members: Sequence[Member], version: str) -> None:
                salts.extend([(await it.pool.seat(key)).salt for key in "abc"])
                await bring(members, version)

            monkeypatch.setattr(it, "bring", bring_later)
            await it.publish(1)
            salts += [(await it.pool.seat(key)).salt for key in "bde"]
    assert salts == ["1", "1", "2/b", "2/c", "2/b", "2", "2"]


async def test_a_server_that_stays_paused_serves_no_turns():
    """It was warned of and admitted, and each turn waited there until its deadline."""
    with policy_serving(PolicyServer()) as good, policy_serving(PolicyServer()) as stuck:
        async with fleet(good, stuck) as it:
            stuck.broken = "/resume"
            await it.publish(0)
            assert (it.serving, it.failed) == ([good.url], [stuck.url])
    assert stuck.notes.count("/resume") == 2, "it is asked once more"


class Hanging(PolicyServer):
    """It is well, and what is broken never ends."""

    async def _note(self, request: Request) -> Response:
        if request.url.path == self.broken:
            self.notes.append(request.url.path)
            await asyncio.sleep(60)
        return await super()._note(request)


async def test_a_server_that_hangs_delays_one_update_and_no_other():
    """Each update asked it anew, and the good servers waited for its deadlines, paused."""
    with policy_serving(PolicyServer()) as good, policy_serving(Hanging()) as hanging:
        async with fleet(good, hanging) as it:
            hanging.broken = "/pause"
            for version in range(3):
                await it.publish(version)
            assert it.serving == [good.url]
    assert hanging.notes.count("/pause") == 1


async def test_a_server_that_fails_is_left_alone_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
):
    """It was asked each second, for ever, and an update of the others waited for it."""
    monkeypatch.setattr(weight_update, "_LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(weight_update, "_PAUSE_RATIO", 0)
    with policy_serving(PolicyServer()) as good, policy_serving(PolicyServer()) as bad:
        async with fleet(good, bad) as it, it.updates.looking_after():
            bad.broken = "/pause"
            await it.publish(0)
            await asyncio.sleep(1.5)
            assert 2 <= bad.notes.count("/pause") <= 8
            bad.broken = ""
            async with asyncio.timeout(20):
                while bad.url not in it.serving:
                    await asyncio.sleep(0.02)


class LostRanks(WeightSender):
    """Its ranks die while a bucket is gathered."""

    def next_bucket(self) -> Bucket | None:
        raise PartLostError("rank 1 has died")

    def leave(self) -> None:
        super().leave()
        if self.has_begun:
            raise PartLostError("rank 1 has died")

    has_begun = False

    def begin(self) -> None:
        self.has_begun = True
        super().begin()


async def test_an_update_whose_ranks_die_is_ended_at_the_servers_before_they_go_on(
    monkeypatch: pytest.MonkeyPatch,
):
    """They were told to go on with half of their weights, and the next turn ended them."""
    monkeypatch.setattr(LostRanks, "join", lambda _: None)
    weights = [("weight", torch.zeros(2))]
    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it:
            transport = GroupTransport(LostRanks(lambda: weights, torch.device("cpu")), 2.0)
            updates = ServerUpdates(it.pool, transport, recomputes=True)
            with pytest.raises(PartLostError, match="rank 1"):
                async with updates.updating(lambda: 0):
                    pass
    assert server.notes[-3:] == ["/start_weight_update", "abandon_weight_update", "/resume"]


async def test_turns_that_find_no_server_say_why_each_was_left_out():
    """A server that could not join the group was said to have ended."""
    with policy_serving(PolicyServer(broken="/pause")) as server:
        async with fleet(server) as it:
            await it.publish(0)
            pool = ServerPool([it.pool.members[0].server], 0.05)
            pool.leave_out(pool.members[0], it.pool.members[0].why)
            with pytest.raises(UserError, match=r"no server samples .*failed to pause: HTTP 500"):
                await pool.seat("an episode")


async def test_a_folder_that_cannot_be_written_is_an_error_of_the_users(tmp_path: Path):
    def write(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it:
            updates = ServerUpdates(it.pool, DiskTransport(write, tmp_path), recomputes=True)
            with pytest.raises(UserError, match="No space left on device"):
                async with updates.updating(lambda: 0):
                    pass
    assert server.notes == ["/pause", "/resume"]


async def test_a_disk_that_gets_full_is_an_error_of_the_users_and_no_half_folder_is_left(
    tmp_path: Path,
):
    """The writer of weights has an error of its own for it: the run ended with a traceback."""

    def write(folder: Path) -> None:
        folder.mkdir()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as a full disk
        try:
            save_file({"weight": torch.zeros(100_000)}, folder / "model.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it:
            updates = ServerUpdates(it.pool, DiskTransport(write, tmp_path), recomputes=True)
            with pytest.raises(UserError, match="cannot write the weights to .*File too large"):
                async with updates.updating(lambda: 0):
                    pass
    assert list(tmp_path.iterdir()) == []


async def test_the_servers_load_the_folder_that_was_written_and_then_it_goes(tmp_path: Path):
    written: list[Path] = []

    def write(folder: Path) -> None:
        folder.mkdir()
        written.append(folder)

    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it:
            updates = ServerUpdates(it.pool, DiskTransport(write, tmp_path), recomputes=True)
            async with updates.updating(lambda: 7):
                pass
    assert (server.version, server.notes) == (
        "7",
        ["/pause", "load_from_disk", "/reset_prefix_cache", "/resume"],
    )
    assert written == [tmp_path / "version_7"]
    assert not written[0].exists()


async def test_a_server_sleeps_while_weights_change_and_wakes_for_them_and_for_its_cache():
    """The first update finds it awake; to wake what is awake would take its memory twice."""
    with policy_serving(PolicyServer()) as server:
        async with fleet(server, recomputes=False, sleeps=True) as it:
            await it.publish(0)
            assert not [note for note in server.notes if "wake" in note or "sleep" in note]
            server.notes.clear()
            async with it.updates.updating(lambda: 1):
                assert server.notes == ["/sleep"]
    expected = ["/sleep", "/pause", "/wake_up weights", "/finish_weight_update"]
    assert server.notes == [*expected, "/wake_up kv_cache", "/resume"]


async def test_a_server_that_was_started_again_while_it_slept_is_not_woken():
    """SGLang's scheduler ends where it is to wake what is awake."""
    with policy_serving(PolicyServer()) as gone:
        it = Fleet(gone, sleeps=True)
        await it.publish(0)
        port = int(gone.url.rpartition(":")[2])
        update = it.updates.updating(lambda: 1)
        await update.__aenter__()
    await update.__aexit__(None, None, None)
    assert it.serving == []
    with policy_serving(PolicyServer(), port) as back:
        async with it.updates.looking_after(), asyncio.timeout(20):
            while not it.serving:
                await asyncio.sleep(0.02)
        assert back.version == "1"
        assert not [note for note in back.notes if "wake" in note]
    await it.pool.members[0].server.close()


async def test_a_server_that_failed_while_it_slept_is_woken_when_it_is_well_again():
    with policy_serving(PolicyServer()) as server:
        async with fleet(server, sleeps=True) as it:
            await it.publish(0)
            async with it.updates.updating(lambda: 1):
                server.broken = "/pause"
            assert it.serving == []
            server.broken = ""
            async with it.updates.looking_after(), asyncio.timeout(20):
                while not it.serving:
                    await asyncio.sleep(0.02)
    assert [note for note in server.notes if "wake" in note] == [
        "/wake_up weights",
        "/wake_up kv_cache",
    ]


def test_servers_on_this_machine_are_met_where_no_other_reaches():
    """Torch's store listens at every address of the machine, whatever host it is given."""
    group = SenderGroup(GroupPlan(("http://127.0.0.1:1",), (1,), False, 5.0), torch.device("cpu"))
    addresses = {
        found.laddr.ip
        for found in psutil.Process().net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and found.laddr.port == group.infos[0].port
    }
    assert addresses == {"127.0.0.1"}


@pytest.mark.parametrize("told", [{}, {"world_size": None}, {"world_size": 0}, {"results": "x"}])
async def test_a_server_that_does_not_say_what_its_workers_are_is_a_failure_of_the_server(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]
):
    """It was a traceback at the first update of a run."""
    server = VllmServer("http://127.0.0.1:9", 1.0, 1.0, 1)

    async def reply(*_: object) -> dict[str, Any]:
        return told

    for name in ("get", "post"):
        monkeypatch.setattr(EngineHttp, name, reply)
    with pytest.raises(ServerFailed, match="failed to count its workers"):
        await server.num_workers()
    with pytest.raises(ServerFailed, match="failed to check the weights' names"):
        await server.misfits(Tensors((), (), ()))
    await server.close()


@pytest.mark.parametrize("told", [{}, {"data": None}, {"data": {"id": "x"}}, {"data": ["x"]}])
async def test_a_server_that_does_not_name_its_models_is_a_failure_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: dict[str, Any]
):
    """It was a traceback at the first publish of adapters."""
    server = VllmServer("http://127.0.0.1:9", 1.0, 1.0, 1)

    async def reply(*_: object) -> dict[str, Any]:
        return told

    monkeypatch.setattr(EngineHttp, "get", reply)
    with pytest.raises(ServerFailed, match="failed to name its models"):
        await server.load_adapters(tmp_path, "1")
    await server.close()


async def test_two_versions_may_be_sampled_while_an_update_is_under_way_and_then_one():
    seen: list[tuple[int, int] | None] = []
    with policy_serving(PolicyServer()) as server:
        async with fleet(server) as it:
            bring = it.bring

            async def noted(members: Sequence[Member], version: str) -> None:
                seen.append(it.pool.versions)
                await bring(members, version)

            it.bring = noted
            for version in (3, 4, 2):
                await it.publish(version)
                seen.append(it.pool.versions)
    assert seen == [None, (3, 3), (3, 4), (4, 4), (4, 2), (2, 2)]

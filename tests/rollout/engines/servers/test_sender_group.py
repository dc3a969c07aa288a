"""The group of the trainer and the servers' workers: its members, and where they meet."""

import psutil
import torch

from forage.rollout.engines.servers.sender_group import GroupPlan, SenderGroup, nccl_joins


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


def test_servers_on_this_machine_are_met_where_no_other_reaches():
    """Torch's store listens on every address of the machine, whatever host it is given."""
    group = SenderGroup(GroupPlan(("http://127.0.0.1:1",), (1,), False, 5.0), torch.device("cpu"))
    addresses = {
        found.laddr.ip
        for found in psutil.Process().net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and found.laddr.port == group.infos[0].port
    }
    assert addresses == {"127.0.0.1"}

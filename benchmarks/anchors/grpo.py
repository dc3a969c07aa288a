"""A GRPO step with search: Forage's demo, and TRL's trainer with the same model, work and search.

TRL is measured with ``tools=`` and with ``rollout_func``, in one process and in two.
"""

from __future__ import annotations

from benchmarks.anchors.bench import Bench, Task
from benchmarks.anchors.demo_world import demo_world
from benchmarks.anchors.machine import num_cores
from benchmarks.anchors.side import Side
from benchmarks.anchors.training_step import step_side
from benchmarks.anchors.trl_trainer import MICRO_BATCHES

EPISODES = 96
AIM = 4.0


def measure(bench: Bench) -> None:
    ours = step_side(bench.folder, EPISODES, "forage train")
    ways = [(kind, processes) for kind in ("tools", "rollout_func") for processes in (1, 2)]
    anchors = [trl_side(bench, kind, processes) for kind, processes in ways]
    aims = {each.name: AIM for each in anchors}
    tasks = [
        Task("whole step", "s", aims),
        Task("its rollout", "s", {}, value="rollout"),
        Task("its learning", "s", {}, value="learning"),
    ]
    bench.race(ours, anchors, tasks, warms_up=False)


def trl_side(bench: Bench, kind: str, processes: int) -> Side:
    """One way to use TRL: its tool loop or a rollout of one's own, with data-parallel processes."""
    arguments = {"world": str(demo_world(bench.folder)), "folder": str(bench.folder)}
    threads = max(1, num_cores() // processes)
    each = EPISODES // processes
    return Side(
        f"TRL {kind}, {processes} process{'es' * (processes > 1)}",
        "benchmarks.anchors.trl_trainer:take_steps",
        f"`{kind}=`, {processes} x {each} episodes generated in one batch per turn, learnt in "
        f"micro-batches of {MICRO_BATCHES[processes]}, no gradient checkpointing, `beta=0`, sdpa "
        f"attention, fused AdamW, {threads} threads per process; the index is searched "
        "in the process",
        {**arguments, "kind": kind, "processes": processes},
        ("trl", "transformers", "accelerate", "torch"),
        {"OMP_NUM_THREADS": str(threads)},
    )

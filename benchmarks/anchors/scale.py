"""Whether a step's time is linear in its episodes: milliseconds per episode, relative to 96."""

from __future__ import annotations

from benchmarks.anchors.bench import Bench, Task
from benchmarks.anchors.training_step import step_side

SIZES = (96, 192, 384, 768)
MOST = 1.05


def measure(bench: Bench) -> None:
    smallest, *others = bench.pick(SIZES[:3], SIZES)
    base = step_side(bench.folder, smallest, f"{smallest} episodes")
    for episodes in others:
        larger = step_side(bench.folder, episodes, f"{episodes} episodes")
        what = f"time per episode, {episodes} relative to {smallest}"
        # The anchor's time divided by ours is the inverse of the growth, so the sides are swapped.
        task = Task(what, "ms", {larger.name: MOST}, value="per_episode", is_most=True)
        bench.race(base, [larger], [task], warms_up=False)

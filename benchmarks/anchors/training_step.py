"""Forage's side of the rows about whole GRPO steps: one step of a demo's run per request."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.anchors.demo_world import demo_config, demo_world
from benchmarks.anchors.side import Side, emptied
from benchmarks.anchors.talk import Talk


def step_side(folder: Path, episodes: int, name: str) -> Side:
    """A run whose steps have ``episodes`` each."""
    return Side(
        name,
        "benchmarks.anchors.training_step:take_steps",
        f"the demo's recipe from its shipped warm start, {episodes} episodes per step, `forage "
        "serve` in a process beside it (no delay), a learning rate that leaves the policy as it "
        "is; no evaluation, no checkpoint",
        {"world": str(demo_world(folder)), "folder": str(folder), "episodes": episodes},
        ("torch", "transformers"),
        program="forage",
    )


def take_steps(talk: Talk, world: str, folder: str, episodes: int) -> None:
    from forage.hardware import quiet_openmp

    quiet_openmp()
    from forage import Run
    from forage.records import read_metrics
    from forage.retrieval.serve.child_server import ServerProcess

    out = emptied(Path(folder) / f"steps-{episodes}")
    with ServerProcess(Path(world) / "index") as server:
        config = demo_config(Path(world), out / "run", server.url, episodes=episodes)
        steps = Run(config).steps()
        next(steps)  # kernels and threads are chosen, memory is taken
        talk.ready(episodes=episodes)
        for _ in talk.requests():
            started = time.perf_counter()
            step = next(steps)
            seconds = time.perf_counter() - started
            rollout_s = read_metrics(config.output_dir)[-1]["seconds/rollout"]
            sampled = sum(episode.num_sampled_tokens for episode in step.episodes)
            talk.reply(
                value=seconds,
                rollout=rollout_s,
                learning=seconds - rollout_s,
                per_episode=seconds / len(step.episodes) * 1000,
                tokens_per_episode=sampled / len(step.episodes),
            )
        del steps  # ends the run

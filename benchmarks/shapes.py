"""A step of every recipe with ranks, at its real size, on tensors without values.

    python -m benchmarks.shapes [RECIPE ...]

It prints the first rank's memory and messages, and what the plan says of the memory. Nothing is
timed, so the figures are the same on any machine.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from tests.shapes.recipes import RECIPES, planned_bytes, recipe
from tests.shapes.traced_step import Stage, trace_step


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace a step of recipes with ranks.")
    parser.add_argument("recipes", nargs="*", choices=RECIPES, default=RECIPES)
    table = Table("recipe", "ranks", "planned GB", "traced GB", "ratio", *_STAGES)
    for name in parser.parse_args().recipes:
        config = recipe(name)
        stages = {stage.name: stage for stage in trace_step(config, rank=0)}
        (planned, _), peak = planned_bytes(config), stages["learn"].peak
        figures = (f"{planned / 1e9:.1f}", f"{peak / 1e9:.1f}", f"{peak / planned:.3f}")
        messages = (_messages(stages[stage]) for stage in _STAGES)
        table.add_row(name, str(config.placement.num_ranks), *figures, *messages)
    Console(width=140).print(table)


_STAGES = ("prepare", "learn", "publish")


def _messages(stage: Stage) -> str:
    num_bytes = sum(each.num_bytes for each in stage.collectives)
    return f"{len(stage.collectives)} ({num_bytes / 1e9:.0f} GB)"


if __name__ == "__main__":
    main()

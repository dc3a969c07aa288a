"""A step of each recipe at its real size and number of ranks, on machines that compute nothing.

A plan's arithmetic is compared with what the trainer allocates, and the messages of ranks with each
other: a rank that sends one more, or in another order, would wait for the others for ever.
"""

from pathlib import Path

import pytest

from forage.config.run_config import RunConfig, load_config, with_overrides
from forage.plan.memory import plan_memory
from forage.training.model_size import measure, measure_others
from tests.shapes.traced_step import Stage, trace_step

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = (
    *("verl-sglang-3b", "slime-lite-3b", "rlinf-3b", "search-r1-grpo-v0.2", "search-r1-ppo-v0.2"),
    *("search-r1-grpo-v0.3-format", "search-r1-ppo-v0.3-format", "browsecomp-plus"),
    *("search-r1-grpo-32b", "search-r1-grpo-72b"),
)

pytestmark = pytest.mark.slow


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def planned_bytes(config: RunConfig) -> int:
    """The plan of the trainer alone, with nothing moved to main memory."""
    together = with_overrides(config, ["placement.engine.offload=false"])
    size = measure(config.model.path)
    assert size is not None
    parts = plan_memory(together, size, measure_others(config.algorithm, size), 1).parts
    others = ("engine", "copy for a checkpoint")
    return sum(part.num_bytes for part in parts if not part.name.startswith(others))


def messages(stages: list[Stage]) -> list[tuple[str, str, int]]:
    return [
        (stage.name, each.name, each.num_bytes) for stage in stages for each in stage.collectives
    ]


def test_every_recipe_with_ranks_is_here() -> None:
    with_ranks = {
        path.stem
        for path in CONFIGS.glob("*.yaml")
        if load_config(path).placement.num_ranks is not None
    }
    assert with_ranks == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_the_peak_of_a_step_is_the_plans(name: str) -> None:
    config = recipe(name)
    stages = {stage.name: stage for stage in trace_step(config, rank=0)}
    peak, planned = stages["learn"].peak, planned_bytes(config)

    assert 0.9 < peak / planned < 1.1
    assert all(stage.peak <= peak for stage in stages.values())


@pytest.mark.parametrize("name", RECIPES)
def test_ranks_send_the_same_messages_in_the_same_order(name: str) -> None:
    """Also where only the first rank has a second micro-batch."""
    longest = recipe(name).environment.max_tokens
    config = recipe(name, f"trainer.max_tokens_per_micro_batch={longest}")
    num_ranks = config.placement.num_ranks
    assert num_ranks is not None
    first, *others = (
        messages(trace_step(config, rank, num_layers=2, is_uneven=True))
        for rank in (0, 1, num_ranks - 1)
    )
    assert first
    assert {name for name, *_ in first} >= {"prepare", "learn", "publish"}
    assert others == [first, first]

"""A step of each recipe at its real size and number of ranks, on machines that compute nothing.

A plan's arithmetic is compared with what the trainer allocates, and the messages of ranks with each
other: a rank that sends one more, or in another order, would wait for the others for ever.
"""

import pytest

from forage.config.run_config import load_config
from tests.shapes.recipes import CONFIGS, RECIPES, planned_bytes, recipe
from tests.shapes.traced_step import Stage, trace_step

# 80 layers have 300,000 operations, which take minutes next to other tests.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def messages(stages: list[Stage]) -> list[tuple[str, str, int]]:
    return [(each.name, one.name, one.num_bytes) for each in stages for one in each.collectives]


def test_every_recipe_with_ranks_is_here() -> None:
    with_ranks = {
        path.stem
        for path in CONFIGS.glob("*.yaml")
        if load_config(path).placement.num_ranks is not None
    }
    assert with_ranks == set(RECIPES)


# For a trainer, search-r1-grpo-v0.3-format is verl-sglang-3b.
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "search-r1-grpo-v0.3-format"])
def test_the_peak_of_a_step_is_the_plans(name: str) -> None:
    config = recipe(name)
    stages = {stage.name: stage for stage in trace_step(config, rank=0)}
    planned, copied = planned_bytes(config)
    peak = stages["learn"].peak
    assert 0.9 < peak / planned < 1.1
    assert all(stages[name].peak <= peak for name in ("build", "prepare", "publish"))
    assert stages["checkpoint"].peak - stages["publish"].now == pytest.approx(copied, rel=0.01)


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
    assert {name for name, *_ in first} >= {"prepare", "learn", "publish"}
    assert others == [first, first]

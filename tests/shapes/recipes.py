"""The recipes with ranks, and what the plan says of a trainer's memory."""

from pathlib import Path

from forage.config.run_config import RunConfig, load_config, with_overrides
from forage.plan.memory import plan_memory
from forage.training.model_size import measure, measure_others

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = (
    *("verl-sglang-3b", "slime-lite-3b", "rlinf-3b", "search-r1-grpo-v0.2", "search-r1-ppo-v0.2"),
    *("search-r1-grpo-v0.3-format", "search-r1-ppo-v0.3-format", "browsecomp-plus"),
    *("search-r1-grpo-32b", "search-r1-grpo-72b"),
)


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def planned_bytes(config: RunConfig) -> tuple[int, int]:
    """The plan of a trainer with everything on its GPU, and of its copy for a checkpoint."""
    overrides = ["placement.engine.offload=false", "trainer.checkpoint_in_background=true"]
    size = measure(config.model.path)
    assert size is not None, "the shapes of recipes are known"
    others = measure_others(config.algorithm, size)
    parts = plan_memory(with_overrides(config, overrides), size, others, num_cores=1).parts
    sizes = {part.name: part.num_bytes for part in parts if not part.name.startswith("engine")}
    copied = sizes.pop("copy for a checkpoint")
    return sum(sizes.values()), copied

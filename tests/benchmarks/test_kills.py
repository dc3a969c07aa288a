"""The benchmark that kills processes of a run, with two kills; benchmarks/scale.md has twenty."""

from pathlib import Path

import pytest

from benchmarks.kills import check_whole, config_of, run_with_kills
from tests.tiny_runs import random_model, world_dir


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_step_and_no_prompt_is_lost_or_taken_twice_when_processes_are_killed(tmp_path: Path):
    config = config_of(tmp_path, world_dir(), random_model(), num_steps=8, checkpoint_every=2)
    told = run_with_kills(config, tmp_path / "recipe.yaml", ("server", "rank"), seed=1)
    assert "resumed after step" in told[1] or "no checkpoint yet" in told[1]
    assert check_whole(config) == 8 * 2 * 4

"""A run whose ranks Ray places: it is the run of one process, whatever is killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from forage.config.run_config import RunConfig
from tests.cluster.ray_head import ray_address
from tests.test_train_ranks import NUM_STEPS, alone, assert_near
from tests.tiny_runs import forage, make_config, start_forage, until, wait_for, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def config_of(out: Path, num_steps: int = NUM_STEPS) -> RunConfig:
    cluster = {"kind": "ray", "address": ray_address(), "cpus_each": 0.5, "startup_timeout_s": 120}
    placement = {"cluster": cluster, "trainer": {"num_ranks": 2}}
    return make_config(out, trainer={"num_steps": num_steps}, placement=placement)


def rank_actors(address: str) -> list[psutil.Process]:
    """The processes of the ranks, as the Ray at that address titles them.

    Other tests have theirs at the same time, which are not to be counted, nor killed.
    """
    found: list[psutil.Process] = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended
            raylet = each.parent()
            if raylet and any("ray::RankActor" in part for part in each.cmdline()):
                found += [each] * (f"--gcs-address={address}" in raylet.cmdline())
    return found


def assert_resumes(recipe: Path, out: Path) -> None:
    resumed = forage("train", recipe, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_near(out, alone(), NUM_STEPS)


def begun(tmp_path: Path) -> tuple[subprocess.Popen[str], Path, Path]:
    """A run that has its first checkpoint."""
    out = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.yaml", config_of(out))
    child = start_forage("train", recipe)
    wait_for(out / "checkpoints" / "step_000002", child)
    return child, recipe, out


def test_a_rank_that_is_killed_under_ray_ends_the_run_which_goes_on(tmp_path: Path):
    child, recipe, out = begun(tmp_path)
    actors = rank_actors(ray_address())
    assert len(actors) == 2
    os.kill(actors[1].pid, signal.SIGKILL)
    _, err = child.communicate()
    assert child.returncode == 2, err
    assert "Traceback" not in err
    assert "has died; go on from the last checkpoint with --resume" in err
    assert_resumes(recipe, out)


def test_a_driver_that_is_killed_takes_its_actors_with_it_and_its_run_goes_on(tmp_path: Path):
    child, recipe, out = begun(tmp_path)
    assert rank_actors(ray_address())
    child.kill()
    child.communicate()
    until(lambda: not rank_actors(ray_address()))
    assert_resumes(recipe, out)

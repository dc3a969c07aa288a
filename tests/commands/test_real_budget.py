"""What of `forage real` fits a time, and the notes that a run which goes on reads."""

import doctest
from importlib import resources
from pathlib import Path

import pytest
import yaml

from forage.commands import real_budget
from forage.commands.real_budget import Rates, RunNotes, choose_before, choose_steps, put_on_device
from forage.errors import UserError


def test_the_worked_examples_are_right() -> None:
    assert doctest.testmod(real_budget) == (0, 2)


def test_a_faster_machine_is_given_more_and_nobody_less_than_a_few() -> None:
    slow, fast = Rates(100.0, 50.0), Rates(0.1, 0.05)
    assert choose_before(slow, 10, 8) == {"warm_start_steps": 2, "num_questions": 16}
    assert choose_before(fast, 60, 8)["num_questions"] == 774
    assert (choose_steps(slow, 10, 32), choose_steps(fast, 60, 32)) == (2, 330)


def test_what_was_chosen_stays_when_a_run_goes_on(tmp_path: Path) -> None:
    notes = RunNotes.open(tmp_path / "run" / "real.json", {"seed": "0"})
    notes.choose(steps=3)
    with notes.phase("learning"):
        pass
    again = RunNotes.open(tmp_path / "run" / "real.json", {"seed": "0"})
    again.choose(steps=5)
    assert again.chosen == {"steps": 3}
    assert again.seconds.keys() == {"learning"}


def test_a_number_that_is_asked_for_holds_and_another_one_later_is_refused(tmp_path: Path) -> None:
    """``--steps 50`` for a run of 12 steps changed nothing, and nobody said so."""
    path = tmp_path / "run" / "real.json"
    RunNotes.open(path, {}).ask(steps=12, num_questions=None)
    notes = RunNotes.open(path, {})
    notes.ask(steps=12, num_questions=None)
    notes.choose(num_questions=16)
    with pytest.raises(UserError, match="has 12 of --steps, not 50"):
        notes.ask(steps=50, num_questions=None)
    assert RunNotes.open(path, {}).chosen == {"steps": 12, "num_questions": 16}


def test_a_run_that_was_killed_at_once_goes_on(tmp_path: Path) -> None:
    """Before its first phase had ended nothing said what the directory was."""
    RunNotes.open(tmp_path / "run" / "real.json", {"seed": "0"})
    (tmp_path / "run" / "models").mkdir()
    RunNotes.open(tmp_path / "run" / "real.json", {"seed": "0"})


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    RunNotes.open(tmp_path / "run" / "real.json", {"seed": "0"}).save()
    with pytest.raises(UserError, match="begun with seed 0, not 1"):
        RunNotes.open(tmp_path / "run" / "real.json", {"seed": "1"})
    (tmp_path / "mine.txt").write_text("here first")
    with pytest.raises(UserError, match="holds no run"):
        RunNotes.open(tmp_path / "real.json", {})


@pytest.mark.parametrize(("device", "tile_rows"), [("cpu", 8), ("cuda", 32)])
def test_a_gpu_decodes_all_slots_in_one_pass(device: str, tile_rows: int) -> None:
    """The tiles of 8 are for a CPU: on a GPU each token of 32 episodes took four passes."""
    text = (resources.files("forage.commands") / "real.yaml").read_text(encoding="utf-8")
    tree = yaml.safe_load(text) | {"model": {}}
    put_on_device(tree, device)
    assert tree["model"]["device"] == device
    assert tree["rollout"]["engine"]["tile_rows"] == tile_rows

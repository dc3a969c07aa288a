"""The checkpoints of one run, as the loop sees them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from forage.config.run_config import build_config
from forage.records import RunRecords
from forage.training import savepoints
from forage.training.checkpoint import checkpoint_path
from forage.training.credit import Credit
from forage.training.savepoints import Savepoints


def make_savepoints(out: Path, learns: bool = True) -> Savepoints:
    trainer = {"checkpoint_in_background": True}
    config = build_config({"model": {"path": "none"}, "output_dir": str(out), "trainer": trainer})
    credit = Credit(config.algorithm, train_on_failed_searches=False)
    nothing = cast(Any, None)
    return Savepoints(config, nothing, nothing, RunRecords(out), credit, learns)


async def test_the_newest_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last one, still being written, was left out of what trackers were given at the end."""
    may_end = threading.Event()
    written = checkpoint_path(tmp_path, 3)

    def write() -> Path:
        assert may_end.wait(60)
        written.mkdir(parents=True)
        return written

    async def begin(*_: object) -> Callable[[], Path]:
        return write

    monkeypatch.setattr(savepoints, "begin_checkpoint", begin)
    points = make_savepoints(tmp_path)
    await points.save(3)
    threading.Timer(0.05, may_end.set).start()
    assert points.newest() == written
    points.close()


async def test_a_run_that_learns_nothing_keeps_its_records_and_writes_no_checkpoint(tmp_path: Path):
    points = make_savepoints(tmp_path, learns=False)
    await points.save(3)
    assert points.newest() is None
    points.close()


def test_the_settings_of_a_run_are_replaced_in_one_move(tmp_path: Path):
    """A full disk left a resumed run's config.yaml empty, and the next resume took defaults."""
    settings, before = tmp_path / "config.yaml", tmp_path / "before.yaml"
    settings.write_text("seed: 3\n")
    before.hardlink_to(settings)
    points = make_savepoints(tmp_path)
    points.restore(None)
    points.close()
    assert before.read_text() == "seed: 3\n"
    assert "output_dir" in settings.read_text()

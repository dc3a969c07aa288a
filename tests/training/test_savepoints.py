"""The checkpoints of one run, as the loop sees them."""

import asyncio
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


def make_savepoints(out: Path, learns: bool = True, in_background: bool = True) -> Savepoints:
    trainer = {"checkpoint_in_background": in_background}
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


@pytest.mark.parametrize("in_background", [True, False])
async def test_a_stop_in_the_middle_of_a_checkpoint_leaves_it_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
):
    """Ctrl-C while one was written: the next one, written on the way out, swept its files away, and
    neither of them nor the one before was left."""
    may_end, notes = threading.Event(), list[str]()

    def write() -> Path:
        notes.append("begun")
        assert may_end.wait(60)
        notes.append("whole")
        return checkpoint_path(tmp_path, 3)

    async def begin(*_: object) -> Callable[[], Path]:
        await asyncio.sleep(0.01)
        return write

    monkeypatch.setattr(savepoints, "begin_checkpoint", begin)
    points = make_savepoints(tmp_path, in_background=in_background)
    saving = asyncio.create_task(points.save(3))
    await asyncio.sleep(0)
    saving.cancel()
    threading.Timer(0.1, may_end.set).start()
    await asyncio.gather(saving, return_exceptions=True)
    assert saving.cancelled()
    await points.save(3)
    points.close()
    assert notes == ["begun", "whole"] * 2


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

"""Checkpoints at an address of fsspec's: copied whole, kept and dropped as here, and fetched."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from forage.errors import UserError
from forage.training.checkpoint import (
    RunState,
    checkpoints,
    load_checkpoint,
)
from forage.training.checkpoints_elsewhere import CheckpointsElsewhere
from tests.training.test_checkpoint import assert_same_weights, begin, learn, new_trainer

RECORD = "metrics.jsonl"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield "memory://bucket/run" if request.param == "memory" else f"file://{tmp_path}/bucket/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class RunHere:
    """A run that learns a step, records a line, and saves here and elsewhere."""

    def __init__(self, out: Path, url: str) -> None:
        self.out, self.trainer = out, new_trainer()
        self.elsewhere = CheckpointsElsewhere(url)
        out.mkdir(parents=True, exist_ok=True)

    @property
    def record(self) -> Path:
        return self.out / RECORD

    def step(self, num_kept: int = 2) -> None:
        learn(self.trainer, self.trainer.version)
        with self.record.open("a") as file:
            file.write(f"step {self.trainer.version}\n")
        state = RunState(self.trainer.version, 3, {RECORD: self.record.stat().st_size})
        saved = begin(self.out, self.trainer, state, num_kept)()
        self.elsewhere.put(saved, num_kept)


def test_the_newest_are_kept_and_one_is_the_run_on_another_machine(tmp_path: Path, url: str):
    run = RunHere(tmp_path / "run", url)
    for _ in range(3):
        run.step()
    assert run.elsewhere.steps() == [2, 3]
    other = tmp_path / "other"
    other.mkdir()
    (other / RECORD).write_text("of nobody, and longer than what the checkpoint knows of")
    CheckpointsElsewhere(url).bring_back(other)
    assert list(checkpoints(other)) == [3]
    trainer = new_trainer(seed=9)
    assert load_checkpoint(checkpoints(other)[3], trainer).num_steps_done == 3
    assert_same_weights(trainer, run.trainer)
    assert (other / RECORD).read_bytes() == run.record.read_bytes()


def test_what_is_newer_here_stays_and_an_unfinished_copy_is_none(tmp_path: Path, url: str):
    run = RunHere(tmp_path / "run", url)
    run.step()
    files, root = fsspec.core.url_to_fs(url)
    files.makedirs(f"{root}/step_000009")
    files.pipe_file(f"{root}/step_000009/model.safetensors", b"half of i")
    assert run.elsewhere.steps() == [1]
    run.elsewhere.bring_back(run.out)
    assert list(checkpoints(run.out)) == [1]
    run.step()
    assert not files.exists(f"{root}/step_000009")


def test_a_copy_under_a_name_of_ones_own_is_no_checkpoint_and_stays(tmp_path: Path, url: str):
    """It once ended the run with a traceback, and was removed with the old checkpoints."""
    run = RunHere(tmp_path / "run", url)
    run.step()
    files, root = fsspec.core.url_to_fs(url)
    files.makedirs(f"{root}/step_000001.best", exist_ok=True)
    files.copy(f"{root}/step_000001/manifest.json", f"{root}/step_000001.best/manifest.json")
    for _ in range(2):
        run.step(num_kept=1)
    assert run.elsewhere.steps() == [3]
    assert files.exists(f"{root}/step_000001.best/manifest.json")


def test_a_damaged_copy_is_passed_over_loudly(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
):
    run = RunHere(tmp_path / "run", url)
    run.step()
    run.step()
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/step_000002/state.json", b"{}")
    with caplog.at_level(logging.ERROR):
        run.elsewhere.bring_back(tmp_path / "other")
    assert list(checkpoints(tmp_path / "other")) == [1]
    assert "state.json is not as it was written" in caplog.text
    assert (tmp_path / "other" / RECORD).read_text() == "step 1\n"


@pytest.mark.parametrize("num_kept", [1, 2])
def test_a_checkpoint_that_is_damaged_here_is_fetched_from_its_whole_copy(
    tmp_path: Path, url: str, num_kept: int
):
    """The run went on from the one before it, and removed the copy that was whole."""
    run = RunHere(tmp_path / "run", url)
    for _ in range(2):
        run.step(num_kept)
    newest = checkpoints(run.out)[2]
    (newest / "model.safetensors").write_bytes(b"damaged")
    run.elsewhere.bring_back(run.out)
    fetched = new_trainer()
    load_checkpoint(newest, fetched)
    assert_same_weights(fetched, run.trainer)
    assert newest.with_name("step_000002.damaged").is_dir()


def test_a_run_that_went_back_forgets_what_came_later_and_records_it_anew(tmp_path: Path, url: str):
    run = RunHere(tmp_path / "run", url)
    for _ in range(3):
        run.step(num_kept=3)
    line = len("step 1\n")
    run.elsewhere.go_back(1, {RECORD: line})
    assert run.elsewhere.steps() == [1]
    run.record.write_text("step 1\nanother step 2\n")
    run.trainer.version = 1
    run.step(num_kept=3)
    run.elsewhere.bring_back(tmp_path / "other")
    assert (tmp_path / "other" / RECORD).read_text() == "step 1\nanother step 2\nstep 2\n"
    run.elsewhere.go_back(0, {})
    run.elsewhere.bring_back(tmp_path / "third")
    assert not checkpoints(tmp_path / "third")


def test_an_address_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for url, why in [("gopher://a/b", "Protocol not known"), (f"file://{tmp_path}/file/run", "")]:
        with pytest.raises(UserError, match=f"checkpoint_url is {url}, and that fails: .*{why}"):
            CheckpointsElsewhere(url)


def test_an_address_that_needs_another_package_says_so(monkeypatch: pytest.MonkeyPatch):
    """It once asked for another address or other rights, where s3fs was not installed."""

    def absent(*args: object, **settings: object) -> NoReturn:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(UserError, match=r"s3://a/b, .* \(Install s3fs .*\); install it with pip"):
        CheckpointsElsewhere("s3://a/b")

"""The card of an exported model, and its upload."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError

from forage.commands.cli import main
from forage.commands.model_card import write_card
from tests.tiny_runs import random_model

CONFIG = {
    "model": {"path": "Qwen/Qwen2.5-3B"},
    "algorithm": {"advantage": {"kind": "grpo"}, "loss": {"kind": "clipped"}},
    "trainer": {"num_steps": 24, "learning_rate": 1e-5},
    "data": {"train": "/home/ada/questions.jsonl"},
}


class Hub:
    """Stands in for the hub: what was created and uploaded, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._error = error
        monkeypatch.setattr(HfApi, "create_repo", lambda _, name, **how: self._create(name, how))
        monkeypatch.setattr(HfApi, "upload_folder", lambda _, **how: self._upload(**how))

    def _create(self, name: str, how: dict[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        assert how == {"private": True, "exist_ok": True}
        self.calls.append(("create", name))

    def _upload(self, repo_id: str, folder_path: Path) -> None:
        names = {path.name for path in folder_path.iterdir()}
        self.calls.append((repo_id, {"README.md", "config.json", "model.safetensors"} <= names))


def test_a_card_has_the_metadata_of_the_hub_and_the_settings_of_the_run(tmp_path: Path):
    write_card(tmp_path, CONFIG, "Qwen/Qwen2.5-3B")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict()["base_model"] == "Qwen/Qwen2.5-3B"
    assert card.data.to_dict()["library_name"] == "transformers"
    for row in ("| `algorithm.advantage` | `grpo` |", "| `trainer.num_steps` | `24` |"):
        assert row in card.text


def test_a_card_names_no_path_of_this_machine(tmp_path: Path):
    base = tmp_path / "owner" / "model"
    base.mkdir(parents=True)
    for path in (str(base), "/home/ada/model", "models/missing/here"):
        write_card(tmp_path, {**CONFIG, "model": {"path": path}}, path)
        text = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert path not in text
        assert "ada" not in text
        assert "base_model" not in yaml.safe_load(text.split("---")[1])


def test_an_export_is_uploaded_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = Hub(monkeypatch)
    out = tmp_path / "exported"
    source = str(random_model())
    assert main(["export", "--from", source, "--out", str(out), "--push", "ada/rome"]) == 0
    assert hub.calls == [("create", "ada/rome"), ("ada/rome", True)]


def test_a_missing_login_ends_the_command_before_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Hub(monkeypatch, LocalTokenNotFoundError("no token found"))
    out = tmp_path / "exported"
    argv = ["export", "--from", str(random_model()), "--out", str(out), "--push", "ada/rome"]
    assert main(argv) == 2
    assert "hf auth login" in capsys.readouterr().err
    assert not out.exists()

"""The whole loop through the commands that a user types, on a generated world and on real text."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from forage.commands.cli import main
from forage.evaluation.report.figure_table import to_rich
from forage.evaluation.report.tables import summary_tables
from forage.evaluation.summary import EvaluationSummary
from forage.records import read_episodes, read_metrics
from forage.retrieval.serve.child_server import ServerProcess
from forage.types import Origin, Status
from tests.tiny_runs import MAX_TOKENS, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_logging_stays_as_it_was")]


@pytest.fixture
def _logging_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forage.commands.cli._set_up_logging", lambda verbosity: None)


def forage(*arguments: str | Path) -> None:
    """A command that must succeed."""
    assert main([str(argument) for argument in arguments]) == 0


def write_recipe(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump({**SETTINGS, **sections}), encoding="utf-8")
    return path


def assert_sound_records(run_dir: Path, num_steps: int, group_size: int) -> None:
    """Checks what a run promises of its records, whatever it learned."""
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(num_steps))
    for row in rows:
        assert row["policy/logprob_diff_max"] <= 1e-5
        assert row["transcript/violations"] == 0
        assert {"reward/mean", "em/mean", "policy/entropy", "seconds/rollout"} <= set(row)
    records = list(read_episodes(run_dir / "episodes.jsonl"))
    assert len(records) == num_steps * SETTINGS["trainer"]["questions_per_step"] * group_size
    for record in records:
        episode = record.episode
        assert episode.reward is not None
        assert episode.num_tokens <= MAX_TOKENS
        assert episode.segments[0].origin is Origin.PROMPT
        assert len([s for s in episode.segments if s.origin is Origin.SAMPLED]) == len(
            episode.turns
        )
        num_sampled = sum(len(s.logprobs_T) for s in episode.segments)
        assert len(record.advantages_T) == num_sampled
        assert all(
            len(call.scores_K) == len(call.result_ids_K)
            for turn in episode.turns
            for call in turn.calls
        )
        if episode.status is Status.ANSWERED:
            assert episode.answer is not None


def test_a_generated_world_from_random_weights_to_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    world, index = tmp_path / "world", tmp_path / "index"
    forage("data", "world", "--size", "300", "--seed", "1", "--out", world)
    forage("index", "--corpus", world / "corpus.jsonl", "--backend", "bm25", "--out", index)
    forage(
        *("new", "--corpus", world / "corpus.jsonl", "--questions", world / "train.jsonl"),
        *("--out", tmp_path / "random", "--vocabulary", "400", "--hidden-size", "64"),
        *("--layers", "2", "--max-tokens", str(MAX_TOKENS)),
    )
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        output_dir=str(tmp_path / "run"),
        model={"path": str(tmp_path / "random")},
        data={
            "train": str(world / "train.jsonl"),
            "test": str(world / "test.jsonl"),
            "index": str(index),
        },
    )
    warm = f"model.path={tmp_path / 'warm'}"
    arms = "evaluation.arms=[normal, closed_book, gold, random]"
    with ServerProcess(index) as server:
        url = f"search.url={server.url}"
        forage("sft", recipe, url, "warm_start.num_steps=30", "--out", tmp_path / "warm")
        forage("eval", recipe, url, warm, arms, "--out", tmp_path / "before.json")
        forage("train", recipe, url, warm, "tracking.trackers=[tensorboard]")
        forage("export", tmp_path / "run", "--out", tmp_path / "trained")
        trained = f"model.path={tmp_path / 'trained'}"
        forage("eval", recipe, url, trained, arms, "--out", tmp_path / "after.json")
        capsys.readouterr()
        forage("play", recipe, "Who founded it?", url, trained)
    assert "Who founded it?" in capsys.readouterr().out

    assert_sound_records(tmp_path / "run", num_steps=4, group_size=4)
    losses = [json.loads(line) for line in (tmp_path / "run" / "warm_start.jsonl").open()]
    assert [row["step"] for row in losses] == list(range(1, 31))
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert (tmp_path / "run" / "config.yaml").exists()
    for name in ("before", "after"):
        figures = json.loads((tmp_path / f"{name}.json").read_text())
        summary = EvaluationSummary.from_json(figures)
        assert list(summary.arms) == ["normal", "closed_book", "gold", "random"]
        assert all(arm.overall.num_questions == 6 for arm in summary.arms.values())
        for table in summary_tables(summary):
            Console(quiet=True).print(to_rich(table))
        records = list(read_episodes(tmp_path / f"{name}.jsonl"))
        assert len(records) == 4 * 6
    weights = {
        name: (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("random", "warm", "trained")
    }
    assert len(set(weights.values())) == 3


def test_real_text_trains_and_evaluates_like_the_generated(tmp_path: Path, shared_data: Path):
    """The world has no special status: here are Wikipedia's paragraphs, over the same HTTP."""
    data, index = tmp_path / "xquad", tmp_path / "index"
    forage("data", "squad", shared_data / "xquad.en.json", "--out", data)
    forage("index", "--corpus", data / "corpus.jsonl", "--out", index)
    forage(
        *("new", "--corpus", data / "corpus.jsonl", "--out", tmp_path / "model"),
        *("--vocabulary", "400", "--hidden-size", "64", "--layers", "2"),
    )
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        output_dir=str(tmp_path / "run"),
        note="Exact match near zero is right for a model of this size.",
        model={"path": str(tmp_path / "model")},
        data={
            "train": str(data / "questions.jsonl"),
            "test": str(data / "questions.jsonl"),
            "index": str(index),
        },
    )
    with ServerProcess(index) as server:
        url = f"search.url={server.url}"
        forage("train", recipe, url, "trainer.num_steps=3", "trainer.group_size=2")
        forage("export", tmp_path / "run", "--out", tmp_path / "trained")
        trained = f"model.path={tmp_path / 'trained'}"
        arms = "evaluation.arms=[normal, gold]"
        forage("eval", recipe, url, trained, arms, "evaluation.num_questions=20")
    assert_sound_records(tmp_path / "run", num_steps=3, group_size=2)
    figures = json.loads((tmp_path / "run" / "evaluation" / "eval.json").read_text())
    summary = EvaluationSummary.from_json(figures)
    assert summary.arms["normal"].overall.num_questions == 20
    assert 0 <= summary.arms["normal"].overall.em.mean <= 0.2

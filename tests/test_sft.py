"""A supervised start: demonstrations of the training questions, or recorded episodes."""

import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from forage.config import RunConfig
from forage.data.questions import read_questions, write_questions
from forage.errors import UserError
from forage.records import write_episode_file
from forage.rollout.player import Player
from forage.sft import demonstrate, run_sft
from forage.training.model import load_tokenizer
from forage.types import Episode, Question, Status
from tests.tiny_runs import make_config, random_model

SHORT = {"num_steps": 3, "sequences_per_step": 8, "warmup_steps": 1}
NOWHERE = {"url": "http://127.0.0.1:9", "startup_timeout_s": 0.1}


def config_of(out: Path, **changes: Any) -> RunConfig:
    return make_config(
        out, **{"model": {"path": str(random_model())}, "warm_start": SHORT, **changes}
    )


def demonstrations(config: RunConfig) -> list[Episode]:
    tokenizer = load_tokenizer(config.model)
    player = Player(config.environment, config.rollout, tokenizer, config.seed)
    assert config.data.train is not None
    questions = read_questions(config.data.train)
    return asyncio.run(demonstrate(config, player, questions, 24))


def mean_em(episodes: list[Episode]) -> float:
    return fmean(episode.reward.parts["em"] for episode in episodes if episode.reward)


ROOMY = {"max_turns": 4, "max_turn_tokens": 120, "max_observation_tokens": 160, "max_tokens": 1024}


def test_good_demonstrations_answer_right_and_poor_ones_hardly(tmp_path: Path):
    def episodes(poor_share: float) -> list[Episode]:
        return demonstrations(
            config_of(
                tmp_path,
                environment=ROOMY,
                warm_start={**SHORT, "poor_share": poor_share},
                trainer={"max_tokens_per_micro_batch": 2048},
            )
        )

    good, poor = episodes(0.0), episodes(1.0)
    assert len(good) == len(poor) == 3 * 8
    assert mean_em(good) == 1.0
    assert mean_em(poor) <= 0.2
    assert all(episode.num_searches == len(episode.question.hops) for episode in good)
    assert all(episode.status is Status.ANSWERED for episode in (*good, *poor))


def test_demonstrations_are_a_function_of_the_seed(tmp_path: Path):
    first, again = demonstrations(config_of(tmp_path)), demonstrations(config_of(tmp_path))
    other = demonstrations(config_of(tmp_path, seed=6))
    assert [episode.segments for episode in first] == [episode.segments for episode in again]
    assert [episode.segments for episode in first] != [episode.segments for episode in other]


@pytest.mark.slow
def test_the_model_learns_and_the_same_start_gives_the_same_weights(tmp_path: Path):
    for name in ("first", "again"):
        config = config_of(tmp_path / name, warm_start={**SHORT, "num_steps": 8})
        run_sft(config, tmp_path / name / "model")
    rows = [json.loads(line) for line in (tmp_path / "first" / "warm_start.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < rows[0]["loss"]
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("first", "again")
    ]
    assert weights[0] == weights[1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "model") is not None


def test_recorded_episodes_are_learnt_without_a_search_server(tmp_path: Path):
    played = demonstrations(config_of(tmp_path))
    write_episode_file(tmp_path / "played.jsonl", 0, {"normal": played})
    settings = {**SHORT, "episodes": str(tmp_path / "played.jsonl")}
    recorded = config_of(tmp_path / "recorded", warm_start=settings, search=NOWHERE)
    run_sft(recorded, tmp_path / "recorded" / "model")
    run_sft(config_of(tmp_path / "shown"), tmp_path / "shown" / "model")
    rows = {
        name: [json.loads(line) for line in (tmp_path / name / "warm_start.jsonl").open()]
        for name in ("recorded", "shown")
    }
    assert [row["loss"] for row in rows["recorded"]] == [row["loss"] for row in rows["shown"]]


def test_reading_is_measured_on_test_questions_at_the_end(tmp_path: Path):
    run_sft(config_of(tmp_path), tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "warm_start.jsonl").open()]
    assert [("reading" in row) for row in rows] == [False, False, True]
    assert 0.0 <= rows[-1]["reading"] <= 0.5  # three steps teach nobody to read


def test_what_cannot_be_learnt_from_is_refused(tmp_path: Path):
    out = tmp_path / "model"
    (tmp_path / "empty.jsonl").touch()
    write_questions(tmp_path / "plain.jsonl", [Question("q", "why?", ("because",), "test")])
    plain = {"train": str(tmp_path / "plain.jsonl")}
    empty = {**SHORT, "episodes": str(tmp_path / "empty.jsonl")}
    absent = {**SHORT, "episodes": str(tmp_path / "absent.jsonl")}
    narrow = {"max_turn_tokens": 4}
    for changes, complaint in (
        ({"data": plain}, r"no question of .*plain.jsonl says how it is solved"),
        ({"data": {"train": None}}, "data.train is missing"),
        ({"warm_start": empty}, "there is no episode to learn from"),
        ({"warm_start": absent}, r"absent.jsonl"),
        ({"environment": narrow}, r"only 0 of 24 demonstrations reached their answer"),
        ({"search": NOWHERE}, "no search server answers at http://127.0.0.1:9"),
        ({"model": {"path": "no/such/model"}}, "model.path is 'no/such/model'"),
    ):
        with pytest.raises(UserError, match=complaint):
            run_sft(config_of(tmp_path / "run", **changes), out)
    assert not out.exists()

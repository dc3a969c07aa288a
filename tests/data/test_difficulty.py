"""Success rates out of recorded episodes, and what a recipe makes of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from forage.config.data_config import DataConfig
from forage.data.order import Difficulty, measure_difficulty, training_questions
from forage.data.questions import write_questions
from forage.errors import UserError
from forage.types import Episode, Question, Status
from tests.episode_files import write_episode_file
from tests.fakes import line_episode

QUESTIONS = [Question(f"q{i}", "who?", ("x",), "nq") for i in range(4)]


def episode(number: int, em: float, status: Status = Status.ANSWERED) -> Episode:
    return replace(line_episode("P 1 S 2", em, status=status), question=QUESTIONS[number])


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """q0 always answered, q1 half the time, q2 never; q3 met failures alone."""
    path = tmp_path / "episodes.jsonl"
    normal = [episode(0, 1.0), episode(1, 1.0), episode(1, 0.0), episode(2, 0.0)]
    failed = [episode(3, 0.0, Status.SEARCH_FAILED), episode(3, 0.0, Status.ENGINE_FAILED)]
    closed = [episode(0, 0.0), episode(2, 1.0)]
    write_episode_file(path, 0, {"normal": [*normal, *failed], "closed_book": closed})
    return path


def test_the_rate_is_the_mean_of_exact_matches_of_episodes_that_were_played_out(measured: Path):
    assert measure_difficulty(measured, QUESTIONS).success_rate == {"q0": 1.0, "q1": 0.5, "q2": 0.0}


def test_questions_outside_the_band_or_never_measured_are_left_out(
    measured: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    difficulty = measure_difficulty(measured, QUESTIONS)
    assert [q.id for q in difficulty.keep_band(QUESTIONS, 0.1, 0.9)] == ["q1"]
    assert "kept 1 of 4 questions" in caplog.text
    assert "1 were never measured" in caplog.text
    assert [q.id for q in difficulty.keep_band(QUESTIONS, 0.0, 0.5)] == ["q1", "q2"]


def test_a_band_without_questions_is_refused():
    with pytest.raises(UserError, match=r"no question has a measured success rate from 0.6 to 0.9"):
        Difficulty({"q0": 1.0}).keep_band(QUESTIONS, 0.6, 0.9)


def test_episodes_of_other_questions_are_refused(measured: Path):
    with pytest.raises(UserError, match="holds no scored episode of the training questions"):
        measure_difficulty(measured, [Question("other", "?", ("x",), "nq")])


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    write_questions(path, QUESTIONS)
    return path


def asked(config: DataConfig) -> list[str]:
    questions, order = training_questions(config, seed=0)
    return [order.at(position).id for position in range(len(questions))]


def test_every_key_of_the_order_changes_what_is_asked(train: Path, measured: Path, tmp_path: Path):
    shuffled = asked(DataConfig(train=train))
    assert sorted(shuffled) == ["q0", "q1", "q2", "q3"]
    easy_first = DataConfig(train=train, order="easy_first", difficulty=measured)
    assert asked(easy_first) == ["q0", "q1", "q2", "q3"] != shuffled
    assert sorted(asked(DataConfig(train=train, difficulty=measured, min_success=0.4))) == [
        "q0",
        "q1",
    ]
    assert sorted(asked(DataConfig(train=train, difficulty=measured, max_success=0.6))) == [
        "q1",
        "q2",
    ]
    mixed = tmp_path / "mixed.jsonl"
    write_questions(mixed, [*QUESTIONS, Question("p", "who?", ("x",), "popqa")])
    assert asked(DataConfig(train=mixed, weights={"nq": 0, "popqa": 1})) == ["p"]


def test_the_form_of_the_training_file_can_be_given(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "a?", "answer": "x", "aug_answer": ["y"]}\n', encoding="utf-8")
    for form, answers in ((None, ("x", "y")), ("flat", ("x",))):
        (question,), _ = training_questions(DataConfig(train=path, train_form=form), seed=0)
        assert question.golden_answers == answers

"""The questions of a training run in their order, as ``data.*`` of the recipe says.

A file of published questions that is not there yet is answered with the command that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from forage.config.data_config import DataConfig
from forage.data.difficulty import measure_difficulty
from forage.data.order import QuestionOrder
from forage.data.questions import read_questions
from forage.errors import UserError
from forage.types import Question


def training_questions(config: DataConfig, seed: int) -> tuple[list[Question], QuestionOrder]:
    """The questions that may be asked, and the order to ask them in; raises ``UserError``."""
    assert config.train is not None, "checked by check_trainable"
    require_file(config.train, config.train_sets, "train")
    questions = read_questions(config.train, config.train_form)
    difficulty = None
    if config.difficulty is not None:
        difficulty = measure_difficulty(config.difficulty, questions)
        if config.has_band:
            questions = difficulty.keep_band(questions, config.min_success, config.max_success)
    by_difficulty = difficulty if config.order == "easy_first" else None
    order = QuestionOrder(questions, seed, config.weights, by_difficulty)
    if config.weights:
        questions = [question for question in questions if config.weights[question.source] > 0]
    return questions, order


def require_file(path: Path, sets: Sequence[str], split: Literal["train", "test"]) -> None:
    """Raise ``UserError`` with the command to run where a file of published sets is missing."""
    if sets and not path.exists():
        raise UserError(f"{path} is not there yet; run: {prepare_command(path, sets, split)}")


def prepare_command(path: Path, sets: Sequence[str], split: Literal["train", "test"]) -> str:
    """What makes a file of published sets."""
    return f"forage data prepare {','.join(sets)} --split {split} --out {path}"

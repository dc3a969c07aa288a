"""The settings of ``data``: files of questions, their order, and the index that some arms read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from forage.settings import Frozen

QuestionSet = Literal[
    "nq",
    "triviaqa",
    "popqa",
    "hotpotqa",
    "2wikimultihopqa",
    "musique",
    "bamboogle",
    "search-r1",
    "seven",
]
"""Published sets as ``forage data prepare`` names them."""


class DataConfig(Frozen):
    """Question files of any form that ``forage.data.forms`` reads, their order, and an index."""

    train: Path | None = None
    """The file of questions to train on."""
    test: Path | None = None
    """The file of questions to evaluate on."""
    train_form: str | None = None
    """The form of the records of train, where it fits more than one."""
    test_form: str | None = None
    """The form of the records of test, where it fits more than one."""
    train_sets: tuple[QuestionSet, ...] = ()
    """The published sets that train is made of, named if the file is missing."""
    test_sets: tuple[QuestionSet, ...] = ()
    """The published sets that test is made of, named if the file is missing."""
    order: Literal["shuffled", "easy_first"] = "shuffled"
    """The order of training; easy_first: the first epoch from easy to hard."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    """The share of each data source in training."""
    difficulty: Path | None = None
    """A file of episodes that says how often each question was answered."""
    min_success: float = Field(default=0.0, ge=0, le=1)
    """Keep questions that were answered at least this often."""
    max_success: float = Field(default=1.0, ge=0, le=1)
    """Keep questions that were answered at most this often."""
    index: Path | None = None
    """A directory of forage index, whose passages the arms gold and random show."""

    @property
    def has_band(self) -> bool:
        """Whether questions are kept by their measured success."""
        return (self.min_success, self.max_success) != (0.0, 1.0)

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        for name in ("train", "test"):
            for key in (f"{name}_form", f"{name}_sets"):
                if getattr(self, key) and getattr(self, name) is None:
                    raise ValueError(f"data.{key} does nothing without data.{name}; remove it")
        is_used = self.order == "easy_first" or self.has_band
        if self.difficulty is not None and not is_used:
            raise ValueError(
                "data.difficulty does nothing by itself: set data.order to easy_first, or "
                "data.min_success and data.max_success"
            )
        if self.difficulty is None and is_used:
            raise ValueError(
                "data.order: easy_first, data.min_success and data.max_success need measured "
                "success rates: set data.difficulty to a file of episodes"
            )
        if self.min_success > self.max_success:
            raise ValueError(
                f"data.min_success ({self.min_success}) is above data.max_success "
                f"({self.max_success})"
            )
        if self.weights and not any(self.weights.values()):
            raise ValueError("data.weights are all 0: no question would be left")
        return self

"""The settings of ``reward``: the published table, the terms around it, functions and a judge.

``run_config.py`` makes them a section of a recipe and adds the checks that span sections. What each
key does is in docs/rewards.md. A new term is a line in ``RewardWeights`` and its formula beside it;
``scoring.py`` adds the terms up, and Search-R1's table, which is made of several, stands there. A
formula reads what the policy wrote, and no prompt and no observation but through ``shown.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from forage.rewards.answers import cover_match, exact_match, f1_score
from forage.rewards.format import ProtocolName, is_format_valid
from forage.rewards.shown import shows_an_answer
from forage.settings import Frozen, OwnPath, written
from forage.types import Episode


@dataclass(frozen=True, slots=True)
class Term:
    """The formula of a term, 0 to 1 for an episode under a protocol.

    It is computed and recorded for every episode, or with ``is_on_demand`` only where the reward
    depends on it.
    """

    formula: Callable[[Episode, ProtocolName], float]
    is_on_demand: bool = False


def _matched(match: Callable[[str, Sequence[str]], float]) -> Term:
    """How well the answer matches the golden ones; 0 without an answer."""

    def formula(episode: Episode, _: ProtocolName) -> float:
        answer = episode.answer
        return 0.0 if answer is None else float(match(answer, episode.question.golden_answers))

    return Term(formula)


def _format_valid(episode: Episode, protocol: ProtocolName) -> float:
    return float(is_format_valid(episode.turns, protocol))


def _retrieved(episode: Episode, _: ProtocolName) -> float:
    golden_answers = episode.question.golden_answers
    return float(any(shows_an_answer(turn, golden_answers) for turn in episode.turns))


Weight = Annotated[float, Field(allow_inf_nan=False)]


class RewardWeights(Frozen):
    """The factors of the sum that is the reward, by part."""

    table: Weight = 1.0
    """The factor of the published table."""
    em: Annotated[Weight, _matched(exact_match)] = 0.0
    """The factor of the exact match."""
    cover_em: Annotated[Weight, _matched(cover_match)] = 0.0
    """The factor of a golden answer within the answer, in whole words."""
    f1: Annotated[Weight, _matched(f1_score)] = 0.0
    """The factor of the overlap of words."""
    format_valid: Annotated[Weight, Term(_format_valid)] = 0.0
    """The factor of a valid format."""
    retrieved: Annotated[Weight, Term(_retrieved, is_on_demand=True)] = 0.0
    """The factor of a golden answer among what was retrieved."""
    judge: Weight = 0.0
    """The factor of the judge's verdict."""

    @classmethod
    def terms(cls) -> dict[str, Term]:
        """The terms by name, in the order of their weights."""
        return {
            name: term
            for name, field in cls.model_fields.items()
            for term in field.metadata
            if isinstance(term, Term)
        }


class RewardFunction(Frozen):
    """A reward of the user's own, ``module:function``, and its factor in the sum."""

    path: OwnPath
    """A function of one's own, module:function."""
    weight: Weight = 1.0
    """Its factor in the sum."""

    @property
    def name(self) -> str:
        """The name of the part that its value is recorded as."""
        return re.split(r"[.:]", written(self.path))[-1].strip("<>")


class JudgeConfig(Frozen):
    """A language model that judges answers, behind any OpenAI-compatible endpoint."""

    url: str | None = None
    """What stands before /chat/completions at an OpenAI-compatible server."""
    model: str = "default"
    """The name under which the server knows the model."""
    key_variable: str | None = None
    """The environment variable that holds the key of the server."""
    key_file: Path | None = None
    """The file that holds the key of the server."""
    prompt: Path | None = None
    """A file with the template; null: the one that ships with Forage."""
    cache: Path | None = Path("runs/judge.sqlite")
    """The file of verdicts that are asked for once; null: none."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens of a verdict at most."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds after which one try of a request is given up."""
    deadline_s: float = Field(default=120.0, gt=0)
    """Seconds after which there is no verdict, retries included."""
    max_retries: int = Field(default=3, ge=0)
    """How often a failed request is sent again."""
    max_concurrent_requests: int = Field(default=16, ge=1)
    """Requests at the same time at most."""

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.key_variable is not None and self.key_file is not None:
            raise ValueError(
                f"reward.judge.key_variable ({self.key_variable}) and key_file ({self.key_file}) "
                "both name the key; remove one"
            )
        if self.deadline_s < self.timeout_s:
            raise ValueError(
                f"reward.judge.deadline_s ({self.deadline_s}) is shorter than timeout_s "
                f"({self.timeout_s}): not even one try would fit; raise deadline_s"
            )
        return self


_TABLE_SCORES = (
    *("structure_score", "final_format_score", "retrieval_score"),
    *("max_answer_tags", "many_answers_factor"),
)
_OTHER_PARTS = (
    *("mean", "has_answer", "sub_em", "answer_tags"),
    *("search_cost", "no_search_penalty"),
)


class RewardConfig(Frozen):
    """The published table, the terms around it, and how they are added up (docs/rewards.md)."""

    answer: Literal["em", "cover_em", "sub_em", "f1", "judge"] = "em"
    """How the answer is compared with the golden ones; sub_em finds them as substrings."""
    structure_score: float = Field(default=0.0, ge=0, le=1)
    """What a valid format adds, as a share of a right answer."""
    final_format_score: float = Field(default=0.0, ge=0, le=1)
    """What a wrong answer earns for ending in an answer."""
    retrieval_score: float = Field(default=0.0, ge=0, le=1)
    """What a wrong answer earns where a golden answer was retrieved."""
    max_answer_tags: int = Field(default=10, ge=1)
    """Closed answers above which many_answers_factor applies."""
    many_answers_factor: float = Field(default=1.0, ge=0, le=1)
    """What is left of the score of a right answer with too many answers."""
    search_cost: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Taken off the reward for each search that was run."""
    no_search_penalty: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Taken off the reward of an episode without a search."""
    weights: RewardWeights = RewardWeights()
    """The factors of the sum, by part."""
    functions: tuple[RewardFunction, ...] = ()
    """Rewards of one's own."""
    judge: JudgeConfig = JudgeConfig()
    """The language model that judges answers."""

    @property
    def needs_judge(self) -> bool:
        """Whether a judge's verdict enters the reward."""
        return self.weights.judge != 0 or (self.answer == "judge" and self.weights.table != 0)

    def needs(self, term: str) -> bool:
        """Whether the reward depends on a built-in term that is computed on demand."""
        is_in_table = term == "retrieved" and self.retrieval_score > 0
        return is_in_table or getattr(self.weights, term) != 0

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are recorded for every episode; functions may add parts below theirs."""
        more = {
            **{"sub_em": self.answer == "sub_em", "table": self.weights.table},
            **{"judge": self.needs_judge, "search_cost": self.search_cost},
            "no_search_penalty": self.no_search_penalty,
        }
        terms = self.weights.terms().items()
        named = [name for name, term in terms if not term.is_on_demand or self.needs(name)]
        named += [name for name, is_there in more.items() if is_there]
        return ("has_answer", *named, *(function.name for function in self.functions))

    @model_validator(mode="after")
    def _table_is_sound(self) -> Self:
        structure, factor = self.structure_score, self.many_answers_factor
        if self.final_format_score > factor * (1 - structure):
            raise ValueError(
                f"reward.final_format_score ({self.final_format_score}) is above what a right "
                f"answer in a broken format earns, many_answers_factor * (1 - structure_score) = "
                f"{factor * (1 - structure):g}: a wrong answer would earn more; lower one of them"
            )
        if structure + self.retrieval_score > 1:
            raise ValueError(
                f"reward.structure_score ({structure}) and retrieval_score "
                f"({self.retrieval_score}) add up to more than 1: a wrong answer would earn more "
                "than a right one; lower one of them"
            )
        if self.retrieval_score and not structure:
            raise ValueError(
                "reward.retrieval_score is only reached through a valid format: "
                "set reward.structure_score above 0, or retrieval_score to 0"
            )
        if self.max_answer_tags != 10 and factor == 1:
            raise ValueError(
                f"reward.max_answer_tags ({self.max_answer_tags}) does nothing while "
                "many_answers_factor is 1; set many_answers_factor (RLinf and veRL: 0.25)"
            )
        return self

    @model_validator(mode="after")
    def _sum_is_sound(self) -> Self:
        weights = self.weights
        if weights.table == 0:
            for name in ("answer", *_TABLE_SCORES):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"reward.{name} is read by the table alone, and reward.weights.table is "
                        "0; remove one of them"
                    )
        terms = [*weights.model_dump().values(), self.search_cost, self.no_search_penalty]
        if not any(terms) and not any(function.weight for function in self.functions):
            raise ValueError("every weight of reward is 0: nothing could be learnt; raise one")
        if self.search_cost and self.search_cost >= weights.table > 0:
            raise ValueError(
                f"reward.search_cost ({self.search_cost}) is no less than reward.weights.table "
                f"({weights.table}): one search would cost what a right answer earns; lower it"
            )
        names = [function.name for function in self.functions]
        for name in names:
            if names.count(name) > 1 or name in (*type(weights).model_fields, *_OTHER_PARTS):
                raise ValueError(
                    f"reward.functions: the part {name} is there already; give the function "
                    "another name"
                )
        return self

    @model_validator(mode="after")
    def _judge_is_used_and_named(self) -> Self:
        if self.needs_judge and self.judge.url is None:
            raise ValueError(
                "reward.judge.url is missing: name the OpenAI-compatible endpoint of the judge, "
                "for example http://127.0.0.1:8001/v1"
            )
        if not self.needs_judge and self.judge != JudgeConfig():
            raise ValueError(
                "reward.judge does nothing: set reward.answer to judge, or reward.weights.judge "
                "to another value than 0"
            )
        return self

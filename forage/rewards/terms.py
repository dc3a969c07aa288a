"""The built-in terms of the reward: of each its name, its formula and its default weight.

A new term is a line in ``RewardWeights`` and its formula beside it; the settings, the sum and the
records take it from there. ``scoring.py`` adds the terms up; Search-R1's table, which is made of
several terms, stands there too. Like ``scoring.py``, a formula reads what the policy wrote, and no
prompt and no observation but through ``shown.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from forage.rewards.answers import cover_match, exact_match, f1_score
from forage.rewards.format import ProtocolName, is_format_valid
from forage.rewards.shown import shows_an_answer
from forage.settings import Frozen
from forage.types import Episode


@dataclass(frozen=True, slots=True)
class Term:
    """The formula of a term, 0 to 1 for an episode under a protocol.

    It is computed and recorded for every episode, or with ``is_on_demand`` only where the reward
    depends on it.
    """

    formula: Callable[[Episode, ProtocolName], float]
    is_on_demand: bool = False


def _em(episode: Episode, _: ProtocolName) -> float:
    answer = episode.answer
    return float(answer is not None and exact_match(answer, episode.question.golden_answers))


def _cover_em(episode: Episode, _: ProtocolName) -> float:
    answer = episode.answer
    return float(answer is not None and cover_match(answer, episode.question.golden_answers))


def _f1(episode: Episode, _: ProtocolName) -> float:
    answer = episode.answer
    return 0.0 if answer is None else f1_score(answer, episode.question.golden_answers)


def _format_valid(episode: Episode, protocol: ProtocolName) -> float:
    return float(is_format_valid(episode.turns, protocol))


def _retrieved(episode: Episode, _: ProtocolName) -> float:
    golden_answers = episode.question.golden_answers
    return float(any(shows_an_answer(turn, golden_answers) for turn in episode.turns))


Weight = Annotated[float, Field(allow_inf_nan=False)]


class RewardWeights(Frozen):
    """The factors of the sum that is the reward, by part.

    ``table`` is the published table and ``judge`` the judge's verdict; the others are the terms.
    """

    table: Weight = 1.0
    """The factor of the published table."""
    em: Annotated[Weight, Term(_em)] = 0.0
    """The factor of the exact match."""
    cover_em: Annotated[Weight, Term(_cover_em)] = 0.0
    """The factor of a golden answer within the answer."""
    f1: Annotated[Weight, Term(_f1)] = 0.0
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

"""Finished episodes for the reward tests, written as short lists of the policy's texts."""

from __future__ import annotations

from forage.environment.actions import Answer, Search, parse_action
from forage.types import ActionKind, Episode, Question, Status, Turn, search_call

OBSERVATION = "\n\n<information>Doc 1(Title: Rome) Rome lies on the Tiber.\n</information>\n\n"


def make_turn(sampled: str, observation: str = OBSERVATION) -> Turn:
    """One turn as the environment would record it; an answer gets no observation."""
    match parse_action(sampled):
        case Search(query):
            return Turn(
                sampled, ActionKind.SEARCH, query, observation, (search_call([query], ("p1",)),)
            )
        case Answer(text):
            return Turn(sampled, ActionKind.ANSWER, text)
        case invalid:
            return Turn(sampled, ActionKind.INVALID, invalid.reason, "\n\nTry again.\n\n")


def make_episode(
    *sampled: str,
    golden: tuple[str, ...] = ("Tiber",),
    observation: str = OBSERVATION,
    status: Status | None = None,
) -> Episode:
    """An episode of these turns; answered if the last one is an answer."""
    turns = tuple(make_turn(text, observation) for text in sampled)
    is_answered = bool(turns) and turns[-1].kind is ActionKind.ANSWER
    return Episode(
        question=Question(
            "q1", "Which river is Rome on?", golden, "test", gold_passage_ids=("p1", "p2")
        ),
        member=0,
        segments=(),
        turns=turns,
        status=status or (Status.ANSWERED if is_answered else Status.OUT_OF_TURNS),
    )

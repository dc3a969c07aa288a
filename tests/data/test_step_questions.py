"""Which questions a step asks and may ask beside them: functions of the step and the seed alone."""

from forage.data.order import QuestionOrder, StepQuestions
from forage.types import Question

ALL = [Question(f"q{n}", f"What is {n}?", (str(n),), "test") for n in range(12)]


def questions_of(num_spare: int, seed: int = 0) -> StepQuestions:
    return StepQuestions(QuestionOrder(ALL, seed), len(ALL), 4, num_spare, seed)


def ids(questions: object) -> list[str]:
    assert isinstance(questions, list | tuple)
    return [question.id for question in questions]


def test_spare_questions_are_others_than_the_steps_own_each_once_and_as_many_as_asked_for():
    for step in range(6):
        asked = questions_of(num_spare=5)
        own, spare = ids(asked.own(step)), ids(asked.spare(step))
        assert (len(own), len(spare), len({*own, *spare})) == (4, 5, 9)


def test_no_more_questions_are_spare_than_there_are():
    asked = questions_of(num_spare=100)
    assert sorted([*ids(asked.own(2)), *ids(asked.spare(2))]) == sorted(q.id for q in ALL)


def test_a_step_asks_the_same_whatever_was_asked_before_and_another_seed_asks_otherwise():
    first, again = questions_of(5), questions_of(5)
    steps = [(ids(first.own(step)), ids(first.spare(step))) for step in range(4)]
    assert [(ids(again.own(s)), ids(again.spare(s))) for s in (3, 2, 1, 0)] == steps[::-1]
    assert ids(first.spare(0)) != ids(first.spare(1))
    assert ids(questions_of(5, seed=1).spare(0)) != ids(first.spare(0))

"""Flat groups are replaced, in bounded rounds, and the end is clear when all are flat."""

from collections.abc import Sequence

from forage.rollout.refill import refill
from forage.types import Group, Question
from tests.rollout.test_scheduler import question

FLAT, VARIED = False, True


class Table:
    """Plays groups that vary as the test has it, and remembers what was asked."""

    def __init__(self, varied: Sequence[int]) -> None:
        self.varied = {f"q{number}" for number in varied}
        self.rounds: list[list[str]] = []

    def is_flat(self, group: Group) -> bool:
        return group.question.id not in self.varied

    async def play_more(self, questions: Sequence[Question], number: int) -> list[Group]:
        self.rounds.append([question.id for question in questions])
        assert number == len(self.rounds)
        return groups(questions)


def groups(questions: Sequence[Question]) -> list[Group]:
    return [Group(question, ()) for question in questions]


async def refilled(
    table: Table, own: int, spare: int, max_rounds: int = 10, oversampling: float = 1.0
):
    """Plays ``own`` questions and wants as many groups that vary."""
    numbers = [question(number) for number in range(own + spare)]
    return await refill(
        groups(numbers[:own]),
        own,
        table.is_flat,
        numbers[own:],
        table.play_more,
        max_rounds,
        oversampling,
    )


async def test_what_varies_everywhere_is_not_played_again():
    table = Table([0, 1, 2])
    found = await refilled(table, own=3, spare=3)
    assert [group.question.id for group in found.chosen] == ["q0", "q1", "q2"]
    assert found.num_rounds == 0
    assert table.rounds == []


async def test_each_round_plays_as_many_as_are_missing():
    table = Table([1, 4, 6])
    found = await refilled(table, own=3, spare=5)
    assert table.rounds == [["q3", "q4"], ["q5"], ["q6"]]
    assert [group.question.id for group in found.chosen] == ["q1", "q4", "q6"]
    assert len(found.played) == 7
    assert found.num_rounds == 3


async def test_oversampling_plays_more_and_keeps_the_first():
    table = Table([1, 3, 4, 5])
    found = await refilled(table, own=3, spare=5, oversampling=2.0)
    assert table.rounds == [["q3", "q4", "q5", "q6"]]
    assert [group.question.id for group in found.chosen] == ["q1", "q3", "q4"]


async def test_rounds_are_bounded_when_everything_is_flat():
    table = Table([])
    found = await refilled(table, own=2, spare=100, max_rounds=4)
    assert len(table.rounds) == 4
    assert found.chosen == ()
    assert len(found.played) == 2 + 4 * 2


async def test_questions_that_run_out_end_it_too():
    table = Table([0])
    found = await refilled(table, own=3, spare=3)
    assert table.rounds == [["q3", "q4"], ["q5"]]
    assert [group.question.id for group in found.chosen] == ["q0"]


async def test_no_round_is_played_where_none_is_allowed():
    table = Table([1])
    found = await refilled(table, own=2, spare=3, max_rounds=0)
    assert table.rounds == []
    assert [group.question.id for group in found.chosen] == ["q1"]

"""The order of questions: epochs, mixtures, curriculum; the same at a position whoever asks."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage.data.order import MIX_BLOCK, Difficulty, QuestionOrder
from forage.errors import UserError
from forage.types import Question


def make_questions(source: str, count: int) -> list[Question]:
    return [Question(f"{source}-{i}", f"{source} {i}?", ("x",), source) for i in range(count)]


NQ, HOTPOT = make_questions("nq", 7), make_questions("hotpotqa", 3)
BOTH = [*NQ, *HOTPOT]


def ids(order: QuestionOrder, count: int, start: int = 0) -> list[str]:
    return [order.at(position).id for position in range(start, start + count)]


def test_without_settings_it_is_one_seeded_shuffle_an_epoch():
    """Spelt out as the loop had it before: recorded runs keep their order."""
    expected = []
    for epoch in range(3):
        order = list(range(len(BOTH)))
        random.Random(f"5/{epoch}").shuffle(order)
        expected += [BOTH[index].id for index in order]
    assert ids(QuestionOrder(BOTH, 5), 30) == expected


@given(
    st.integers(0, 3),
    st.sampled_from([None, {"nq": 1.0, "hotpotqa": 2.0}, {"nq": 0.0, "hotpotqa": 1.0}]),
    st.lists(st.integers(0, 5000), min_size=1, max_size=20),
)
def test_a_position_does_not_depend_on_what_was_asked_before(seed, weights, positions):
    """A resumed run asks from the middle, and must be given what the first run was given."""
    walked = QuestionOrder(BOTH, seed, weights)
    for position in positions:
        assert walked.at(position) == QuestionOrder(BOTH, seed, weights).at(position)


def test_a_step_takes_its_own_stretch():
    order = QuestionOrder(BOTH, 1)
    assert [q.id for step in range(5) for q in order.of_step(step, 4)] == ids(order, 20)


def test_the_seed_changes_the_order():
    assert ids(QuestionOrder(BOTH, 1), 10) != ids(QuestionOrder(BOTH, 2), 10)
    weights = {"nq": 1.0, "hotpotqa": 1.0}
    assert ids(QuestionOrder(BOTH, 1, weights), 10) != ids(QuestionOrder(BOTH, 2, weights), 10)


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(0, 3))
def test_sources_come_in_the_proportions_of_their_weights(nq: float, hotpot: float, block: int):
    order = QuestionOrder(BOTH, 0, {"nq": nq, "hotpotqa": hotpot})
    sources = [order.at(block * MIX_BLOCK + i).source for i in range(MIX_BLOCK)]
    assert Counter(sources)["nq"] == pytest.approx(MIX_BLOCK * nq / (nq + hotpot), abs=1)


def test_each_source_runs_through_its_own_epochs():
    order = QuestionOrder(BOTH, 0, {"nq": 1.0, "hotpotqa": 1.0})
    drawn = [order.at(position) for position in range(2 * MIX_BLOCK)]
    for source, pool in (("nq", NQ), ("hotpotqa", HOTPOT)):
        own = [question.id for question in drawn if question.source == source]
        for epoch in range(len(own) // len(pool)):
            stretch = own[epoch * len(pool) : (epoch + 1) * len(pool)]
            assert sorted(stretch) == sorted(question.id for question in pool)


def test_sources_are_mixed_and_not_laid_end_to_end():
    order = QuestionOrder(BOTH, 0, {"nq": 1.0, "hotpotqa": 1.0})
    assert {question.source for question in order.of_step(0, 16)} == {"nq", "hotpotqa"}


def test_a_source_of_weight_nought_is_left_out():
    order = QuestionOrder(BOTH, 0, {"nq": 0.0, "hotpotqa": 1.0})
    assert {order.at(position).source for position in range(50)} == {"hotpotqa"}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"nq": 1.0, "hotpotqa": 1.0, "popqa": 1.0}, "names popqa, .* come from hotpotqa, nq"),
        ({"nq": 1.0}, "has no weight for hotpotqa"),
        ({"nq": 1.0, "hotpotqa": 1e-4}, "hotpotqa has less than one question in 1000"),
    ],
)
def test_weights_that_do_not_fit_the_questions_are_refused(weights, message):
    with pytest.raises(UserError, match=message):
        QuestionOrder(BOTH, 0, weights)


def test_the_first_epoch_of_a_curriculum_runs_from_easy_to_hard():
    rates = {"nq-0": 0.0, "nq-1": 1.0, "nq-2": 0.5, "nq-3": 0.5, "nq-4": 0.25, "nq-5": 0.75}
    order = QuestionOrder(NQ, 3, difficulty=Difficulty(rates))
    first, second = ids(order, 7), ids(order, 7, start=7)
    assert [rates.get(i) for i in first] == [1.0, 0.75, 0.5, 0.5, 0.25, 0.0, None]
    assert second == ids(QuestionOrder(NQ, 3), 7, start=7), "later epochs are shuffled as ever"


def test_questions_that_are_equally_hard_are_shuffled():
    rates = {question.id: 0.5 for question in NQ}
    assert ids(QuestionOrder(NQ, 3, difficulty=Difficulty(rates)), 7) == ids(
        QuestionOrder(NQ, 3), 7
    )


def test_a_curriculum_and_weights_go_together():
    rates = {question.id: i / 10 for i, question in enumerate(BOTH)}
    order = QuestionOrder(BOTH, 0, {"nq": 1.0, "hotpotqa": 1.0}, Difficulty(rates))
    drawn = [order.at(position) for position in range(40)]
    for pool in (NQ, HOTPOT):
        own = [q.id for q in drawn if q.source == pool[0].source][: len(pool)]
        assert own == [question.id for question in reversed(pool)]

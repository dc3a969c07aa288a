import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage.rewards.answers import cover_match, exact_match, f1_score, normalize_answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("Theatre of Anatolia", "theatre of anatolia"),  # articles go as words only
        ("U.S.A.", "usa"),
        ("a.b", "ab"),
        ("rock-and-roll", "rockandroll"),
        ("the-the the", "thethe"),
        ("\tnew\n york ", "new york"),
        ("«Ça va»", "«ça va»"),  # ASCII punctuation alone is deleted
        ("The", ""),
        ("A.", ""),  # the point goes first, and an article is left
        ("...", ""),
        ("", ""),
    ],
)
def test_normalising_follows_the_published_rule(text: str, normal: str):
    assert normalize_answer(text) == normal


@given(st.text())
def test_normalising_twice_changes_nothing_more(text: str):
    once = normalize_answer(text)
    assert normalize_answer(once) == once


@given(st.text(alphabet="aAn the.,-!\n\t\u00a0İßΣ", max_size=30))
def test_normalising_twice_changes_nothing_more_around_articles(text: str):
    once = normalize_answer(text)
    assert normalize_answer(once) == once


@pytest.mark.parametrize(
    ("prediction", "golden", "em", "cover", "f1"),
    [
        ("The Tiber", ["tiber"], True, True, 1.0),
        ("the river Tiber", ["Tiber"], False, True, 2 / 3),
        ("Tiber", ["the river Tiber"], False, False, 2 / 3),
        ("big red dog", ["red cat"], False, False, 0.4),
        ("red cat", ["dog", "a red, red cat"], False, False, 0.8),
        ("dog", ["cat", "Dog."], True, True, 1.0),
        ("romeo", ["Rome"], False, True, 0.0),  # a substring, but no common word
        ("", ["Rome"], False, False, 0.0),
        ("Rome", [], False, False, 0.0),
        ("to be to be", ["be be be"], False, False, 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),
    ],
)
def test_matches_worked_by_hand(
    prediction: str, golden: list[str], em: bool, cover: bool, f1: float
):
    assert exact_match(prediction, golden) is em
    assert cover_match(prediction, golden) is cover
    assert f1_score(prediction, golden) == pytest.approx(f1)


@pytest.mark.parametrize("golden", ["The", "...", "a", "", "?!"])
def test_a_golden_answer_that_normalises_to_nothing_matches_by_raw_equality_alone(golden: str):
    """The originals compare normalised texts, so an empty prediction won against "The"."""
    for prediction in ("an", " ", "the ...", "anything", "tiber"):
        assert not exact_match(prediction, [golden])
        assert not cover_match(prediction, [golden])
        assert f1_score(prediction, [golden]) == 0.0
    assert exact_match(golden, [golden])
    assert cover_match(golden, [golden])
    assert f1_score(golden, [golden]) == 1.0


def test_a_golden_answer_that_normalises_to_nothing_spoils_no_other():
    assert exact_match("who", ["The", "Who"])
    assert f1_score("who", ["The", "Who"]) == 1.0
    assert not cover_match("", ["The", "Who"])


@pytest.mark.parametrize("match", [exact_match, cover_match, f1_score])
def test_a_bare_string_of_golden_answers_is_refused_with_the_way_to_write_it(match):
    with pytest.raises(TypeError, match=r"\['Rome'\]"):
        match("R", "Rome")


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=4))
def test_an_exact_match_is_a_cover_match_and_has_an_f1_of_one(prediction: str, golden: list[str]):
    f1 = f1_score(prediction, golden)
    assert 0.0 <= f1 <= 1.0
    if exact_match(prediction, golden):
        assert cover_match(prediction, golden)
        assert f1 == 1.0


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_further_golden_answer_never_lowers_a_match(prediction: str, other: str):
    assert exact_match(prediction, [other, prediction])
    assert f1_score(prediction, ["Rome", other]) >= f1_score(prediction, ["Rome"])


@pytest.mark.parametrize(
    ("prediction", "golden", "f1"),
    [
        ("yes it is", "yes", 0.0),
        ("no", "no one", 0.0),
        ("noanswer", "noanswer given", 0.0),
        ("Yes.", "yes", 1.0),
        ("yes it is", "yes it was", 2 / 3),
    ],
)
def test_yes_no_and_noanswer_count_only_whole(prediction: str, golden: str, f1: float):
    """HotpotQA and FlashRAG score so; "yes it is" for "yes" earned half a point."""
    assert f1_score(prediction, [golden]) == pytest.approx(f1)

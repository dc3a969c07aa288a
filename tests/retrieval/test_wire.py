import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage.retrieval.wire import normalise_query


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("who wrote it", "who wrote it"),
        ("  who\twrote\x00 it ", "who wrote it"),
        ("Who WROTE it?", "Who WROTE it?"),
        ("Zu\u0308rich", "Zürich"),
        ("a\u3000b\u2028c", "a b c"),
        ("\ud800 compiler", "\ufffd compiler"),
        ("\ud83d\ude00", "😀"),
        ("", ""),
        (" \n\x07\x85 ", ""),
    ],
)
def test_spellings_that_differ_in_nothing_one_sees_become_one(query: str, expected: str):
    assert normalise_query(query) == expected


@given(st.text(st.characters(exclude_categories=[])))
def test_a_normalised_query_is_its_own_normal_form_and_can_be_sent(query: str):
    normal = normalise_query(query)
    assert normalise_query(normal) == normal
    assert normal.encode("utf-8").decode("utf-8") == normal
    assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in normal)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)))
def test_the_short_way_for_ascii_gives_what_the_long_way_gives(query: str):
    assert normalise_query(query) == " ".join(query.split())

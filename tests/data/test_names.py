import random
import re
from collections import Counter

import pytest

from forage.data.names import COMPANY_WORDS, EVENT_WORDS, NAMESAKE_SHARE, WORK_WORDS, NameMaker

KINDS = ("person", "town", "region", "company", "work", "event")
# Every name is made of syllables of one consonant and one vowel.
WORD = r"[BDKLMNRSTV][aeio](?:[bdklmnrstv][aeio]){%s}"
PATTERNS = {
    "person": f"{WORD % '1'} {WORD % '1'}",
    "town": WORD % "2",
    "region": f"{WORD % '1'}(?:land|mark)",
    "company": f"{WORD % '2'} (?:{'|'.join(COMPANY_WORDS)})",
    "work": f"{WORD % '2'} (?:{'|'.join(WORK_WORDS)})",
    "event": f"{WORD % '2'} (?:{'|'.join(EVENT_WORDS)})",
}


def draw(num_each: int, seed: int = 0) -> dict[str, list[str]]:
    maker = NameMaker(random.Random(seed))
    return {kind: [getattr(maker, kind)() for _ in range(num_each)] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_made_of_few_syllables(kind: str):
    for name in draw(200)[kind]:
        assert re.fullmatch(PATTERNS[kind], name), name


def test_no_two_names_are_equal_whatever_their_kind():
    names = [name for names in draw(700).values() for name in names]
    assert len(set(names)) == len(names)


def test_no_name_is_a_word_of_another_name():
    """A town was once called Navoke while a company was called Navoke Mills."""
    names = draw(1500, seed=1)
    whole = {name for kind in ("town", "region") for name in names[kind]}
    others = [name for kind in ("person", "company", "work", "event") for name in names[kind]]
    assert not whole & {word for name in others for word in name.split()}


@pytest.mark.parametrize(("kind", "at"), [("person", 0), ("person", 1), ("company", 0)])
def test_about_a_third_of_the_names_share_a_word_with_a_namesake(kind: str, at: int):
    words = [name.split()[at] for name in draw(600)[kind]]
    repeated = 1 - len(set(words)) / len(words)
    assert repeated == pytest.approx(NAMESAKE_SHARE, abs=0.1)
    assert max(Counter(words).values()) >= 3


def test_the_same_seed_draws_the_same_names_and_another_seed_others():
    assert draw(50, seed=5) == draw(50, seed=5)
    assert not set(draw(50, seed=5)["town"]) & set(draw(50, seed=6)["town"])


def test_names_that_run_out_are_said_to():
    maker = NameMaker(random.Random(0))
    with pytest.raises(AssertionError, match="the world is too large"):
        [maker.region() for _ in range(5000)]

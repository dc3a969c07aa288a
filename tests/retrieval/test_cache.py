from hypothesis import given
from hypothesis import strategies as st

from forage.retrieval.cache import LruCache


def test_the_entry_used_least_recently_makes_room():
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]


def test_a_cache_of_size_zero_keeps_nothing():
    cache: LruCache[str, int] = LruCache(0)
    cache.put("a", 1)
    assert cache.get("a") is None
    assert len(cache) == 0


def test_a_value_that_is_heavier_than_the_cache_is_not_kept():
    cache: LruCache[str, str] = LruCache(3, weigh=len)
    cache.put("a", "xxxx")
    assert cache.get("a") is None


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 4))))
def test_what_is_kept_never_weighs_more_than_the_cache(puts: list[tuple[str, int]]):
    cache: LruCache[str, int] = LruCache(5, weigh=lambda value: value)
    for key, value in puts:
        cache.put(key, value)
    kept = {key: value for key in "abcdef" if (value := cache.get(key)) is not None}
    assert sum(kept.values()) <= 5
    if puts:
        assert kept[puts[-1][0]] == puts[-1][1]

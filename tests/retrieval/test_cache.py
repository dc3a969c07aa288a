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

"""Worked cases of eviction: whose turn it is, what goes together and what stays."""

from __future__ import annotations

import pytest

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import FreedSlots
from tests.cache.helpers import checkpoint, freed_sets, ints, prefix_of, state_contents


def cache_of(*sequences) -> RadixCache:
    """Each sequence is its tokens and the lengths of its checkpoints; slots count up from 1 in both pools."""
    cache, kv, states = RadixCache(), 1, 1
    for tokens, lengths in sequences:
        checkpoints = [checkpoint(length, states + i) for i, length in enumerate(lengths)]
        cache.insert(ints(tokens), ints(range(kv, kv + len(tokens))), checkpoints)
        kv, states = kv + len(tokens), states + len(lengths)
    cache.check()
    return cache


def node_at(cache, *prefix):
    return next(node for node in cache.nodes() if prefix_of(node) == prefix)


def test_kv_goes_by_leaves_least_recently_used_first():
    cache = cache_of(([1, 2], [2]), ([3, 4], [2]), ([5, 6], [2]))
    cache.unlock(cache.lock_kv(node_at(cache, 1, 2)))
    assert freed_sets(cache.evict_kv(1)) == ([3, 4], [2])
    assert freed_sets(cache.evict_kv(3)) == ([1, 2, 5, 6], [1, 3])
    assert freed_sets(cache.evict_kv(1)) == ([], [])


def test_evicting_nothing_frees_nothing():
    cache = cache_of(([1, 2], [2]))
    for freed in (cache.evict_kv(0), cache.evict_state(0)):
        assert freed_sets(freed) == ([], [])
    for evict in (cache.evict_kv, cache.evict_state):
        with pytest.raises(ValueError, match="-1"):
            evict(-1)


def test_an_inner_node_with_a_state_outlives_its_leaf_and_is_then_a_leaf():
    cache = cache_of(([1, 2, 3, 4], [2, 4]), ([7], [1]))
    assert freed_sets(cache.evict_kv(1)) == ([3, 4], [2])
    cache.check()
    assert state_contents(cache) == {(1, 2): (1, "tail"), (7,): (3, "tail")}
    assert freed_sets(cache.evict_kv(1)) == ([1, 2], [1])


def test_a_leaf_takes_along_the_tombstones_that_only_led_to_it():
    cache = cache_of(([1, 2, 3], [1, 2, 3]), ([7], [1]))
    for prefix in [(1, 2, 3), (7,)]:
        cache.unlock(cache.lock(node_at(cache, *prefix)))
    assert freed_sets(cache.evict_state(2)) == ([], [1, 2])
    assert freed_sets(cache.evict_kv(1)) == ([1, 2, 3], [3])


def test_a_cascade_stops_at_a_branch_a_state_or_a_lock():
    branch = cache_of(([1, 2], [2]), ([1, 3], [2]))
    assert freed_sets(branch.evict_kv(1)) == ([2], [1])
    assert freed_sets(branch.evict_kv(1)) == ([1, 4], [2])

    locked = cache_of(([1, 2], [1, 2]))
    receipt = locked.lock_kv(node_at(locked, 1))
    assert freed_sets(locked.evict_state(2)) == ([2], [1, 2])
    locked.check()
    assert freed_sets(locked.unlock(receipt)) == ([1], [])


def test_state_eviction_makes_tombstones_inside_and_removes_leaves():
    cache = cache_of(([1, 2, 3, 4], [2, 4]))
    assert freed_sets(cache.evict_state(1)) == ([], [1])
    cache.check()
    assert cache.match(ints([1, 2, 3, 9])).state_length == 0
    assert freed_sets(cache.evict_state(1)) == ([1, 2, 3, 4], [2])
    assert cache.num_nodes == 0


def test_a_state_on_a_locked_leaf_leaves_its_kv():
    cache = cache_of(([1, 2], [2]))
    receipt = cache.lock_kv(node_at(cache, 1, 2))
    assert freed_sets(cache.evict_state(1)) == ([], [1])
    cache.check()
    assert cache.num_kv_slots == 2
    assert freed_sets(cache.unlock(receipt)) == ([1, 2], [])


def test_a_use_refreshes_kv_of_the_path_but_only_the_state_used():
    cache = cache_of(([1, 2, 3, 4], [2, 4]), ([7], [1]))
    cache.unlock(cache.lock(node_at(cache, 1, 2, 3, 4)))
    assert freed_sets(cache.evict_kv(1)) == ([5], [3])
    assert freed_sets(cache.evict_state(1)) == ([], [1])


def test_a_kv_lock_does_not_refresh_the_state():
    cache = cache_of(([1, 2], [2]), ([7], [1]))
    cache.unlock(cache.lock_kv(node_at(cache, 1, 2)))
    assert freed_sets(cache.evict_state(1)) == ([1, 2], [1])


def test_a_duplicate_insert_refreshes_what_is_there():
    cache = cache_of(([1, 2], [2]), ([7], [1]), ([1, 2], [2]))
    assert freed_sets(cache.evict_state(1)) == ([3], [2])


def test_of_the_checkpoints_of_one_insert_the_deepest_stays_longest():
    cache = cache_of(([1, 2, 3], [3, 1, 2]))
    assert [cache.evict_state(1).state_slots.tolist() for _ in range(3)] == [[2], [3], [1]]


def test_after_a_split_the_lower_part_keeps_its_recency():
    cache = cache_of(([1, 2, 3], [3]), ([7], [1]), ([1, 2], [2]))
    assert freed_sets(cache.evict_kv(1)) == ([3], [1])
    assert freed_sets(cache.evict_kv(1)) == ([4], [2])
    assert freed_sets(cache.evict_kv(1)) == ([1, 2], [3])


def test_kv_and_states_are_evicted_independently():
    cache = cache_of(([1, 2], [2]), ([3, 4], [2]))
    receipt = cache.lock(node_at(cache, 1, 2))
    receipt.release_state()  # its state is used last, its KV is locked
    assert freed_sets(cache.evict_state(1)) == ([3, 4], [2])
    assert freed_sets(cache.evict_kv(9)) == ([], [])
    assert freed_sets(cache.evict_state(1)) == ([], [1])
    cache.unlock(receipt)
    cache.check()


def test_freed_slots_add_up():
    total = FreedSlots(ints([1, 2]), ints([3])) + FreedSlots(ints([4]), ints([]))
    assert total.kv_slots.tolist() == [1, 2, 4]
    assert total.state_slots.tolist() == [3]
    assert total.state_slots.dtype == total.kv_slots.dtype == "int32"

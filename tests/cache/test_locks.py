"""Worked cases of locks: what they keep, what their release frees, and splits in between."""

from __future__ import annotations

import pytest

from hybrid_runtime.cache.radix_cache import RadixCache
from tests.cache.helpers import checkpoint, freed_sets, ints, prefix_of, state_contents


@pytest.fixture
def cache() -> RadixCache:
    """[1 2] (state 1) ─ [3 4] (state 2), and a sequence of its own, [7 8] (state 3)."""
    cache = RadixCache()
    cache.insert(ints([1, 2, 3, 4]), ints([11, 12, 13, 14]), [checkpoint(2, 1), checkpoint(4, 2)])
    cache.insert(ints([7, 8]), ints([17, 18]), [checkpoint(2, 3)])
    return cache


def node_at(cache, *prefix):
    return next(node for node in cache.nodes() if prefix_of(node) == prefix)


def test_lock_keeps_the_path_and_the_state_of_its_node_only(cache):
    receipt = cache.lock(node_at(cache, 1, 2, 3, 4))
    cache.check()
    assert receipt.holds_state
    assert (cache.num_protected_kv, cache.num_evictable_kv) == (4, 2)
    assert (cache.num_protected_states, cache.num_evictable_states) == (1, 2)
    assert freed_sets(cache.evict_kv(99)) == ([17, 18], [3])
    assert freed_sets(cache.evict_state(99)) == ([], [1])
    assert state_contents(cache) == {(1, 2, 3, 4): (2, "tail")}
    cache.check()


def test_lock_kv_keeps_the_path_and_no_state(cache):
    receipt = cache.lock_kv(node_at(cache, 1, 2, 3, 4))
    assert not receipt.holds_state
    assert freed_sets(cache.evict_state(99)) == ([17, 18], [1, 2, 3])
    cache.check()
    assert freed_sets(cache.evict_kv(99)) == ([], [])
    assert freed_sets(cache.unlock(receipt)) == ([11, 12, 13, 14], [])
    assert cache.num_nodes == 0


def test_release_state_is_idempotent_and_part_of_unlock(cache):
    node = node_at(cache, 1, 2)
    first, second = cache.lock(node), cache.lock(node)
    assert node.state_lock == 2
    first.release_state()
    first.release_state()
    cache.check()
    assert node.state_lock == 1
    cache.unlock(first)
    first.release_state()
    assert (node.kv_lock, node.state_lock) == (1, 1)
    cache.unlock(second)
    assert (node.kv_lock, node.state_lock) == (0, 0)
    cache.check()


def test_a_receipt_works_once_and_only_for_its_cache(cache):
    receipt = cache.lock(node_at(cache, 1, 2))
    with pytest.raises(ValueError, match="no lock is held"):
        RadixCache().unlock(receipt)
    cache.unlock(receipt)
    with pytest.raises(ValueError, match="no lock is held"):
        cache.unlock(receipt)
    cache.check()


def test_the_root_can_be_locked(cache):
    receipt = cache.lock(cache.match(ints([5, 5])).node)
    assert not receipt.holds_state
    assert cache.root.kv_lock == 1
    cache.check()
    assert freed_sets(cache.evict_kv(99))[0] == [11, 12, 13, 14, 17, 18]
    assert freed_sets(cache.unlock(receipt)) == ([], [])
    assert cache.root.kv_lock == 0


def test_a_node_that_left_the_tree_cannot_be_locked(cache):
    node = node_at(cache, 7, 8)
    cache.evict_state(99)
    with pytest.raises(ValueError, match="left the tree"):
        cache.lock(node)


def test_a_receipt_survives_splits_of_its_node(cache):
    node = node_at(cache, 1, 2, 3, 4)
    receipt = cache.lock(node)
    cache.insert(ints([1, 2, 3, 9]), ints([21, 22, 23, 29]), [checkpoint(4, 5)])
    cache.check()
    assert receipt.node is node
    assert prefix_of(node) == (1, 2, 3, 4)
    upper = node_at(cache, 1, 2, 3)
    assert (upper.kv_lock, upper.state_lock) == (1, 0)
    assert (node.kv_lock, node.state_lock) == (1, 1)
    assert node_at(cache, 1, 2, 3, 9).kv_lock == 0
    cache.insert(ints([1, 8]), ints([31, 38]), [checkpoint(2, 6)])
    cache.check()
    cache.unlock(receipt)
    cache.check()
    assert cache.num_protected_kv == cache.num_protected_states == 0
    assert all(each.kv_lock == 0 for each in cache.nodes())


def test_a_lock_taken_between_two_splits_counts_on_the_parts_above_it(cache):
    node = node_at(cache, 1, 2, 3, 4)
    outer = cache.lock(node)
    cache.insert(ints([1, 2, 3]), ints([21, 22, 23]), [checkpoint(3, 5)])
    inner = cache.lock(node_at(cache, 1, 2, 3))
    cache.insert(ints([1]), ints([31]), [checkpoint(1, 6)])
    cache.check()
    assert [node_at(cache, *[1, 2, 3, 4][:n]).kv_lock for n in (1, 2, 3, 4)] == [2, 2, 2, 1]
    cache.unlock(outer)
    cache.check()
    assert [node_at(cache, *[1, 2, 3, 4][:n]).kv_lock for n in (1, 2, 3, 4)] == [1, 1, 1, 0]
    cache.unlock(inner)
    cache.check()


def test_unlock_prunes_the_parts_of_a_split_node_that_nothing_needs(cache):
    receipt = cache.lock(node_at(cache, 1, 2, 3, 4))
    receipt.release_state()
    cache.insert(ints([1, 2, 3, 9]), ints([21, 22, 23, 29]), [checkpoint(4, 5)])
    cache.evict_state(99)
    cache.check()
    assert cache.num_state_slots == 0
    assert sorted(cache.owned_kv_slots().tolist()) == [11, 12, 13, 14]
    assert freed_sets(cache.unlock(receipt)) == ([11, 12, 13, 14], [])
    assert cache.num_nodes == 0


def test_unlock_prunes_up_to_the_next_lock(cache):
    inner = cache.lock_kv(node_at(cache, 1, 2))
    outer = cache.lock_kv(node_at(cache, 1, 2, 3, 4))
    cache.evict_state(99)
    assert freed_sets(cache.unlock(outer)) == ([13, 14], [])
    cache.check()
    assert freed_sets(cache.unlock(inner)) == ([11, 12], [])


def test_a_state_revived_under_a_lock_is_not_locked_by_older_receipts(cache):
    node = node_at(cache, 1, 2, 3, 4)
    receipt = cache.lock(node)
    receipt.release_state()
    cache.evict_state(99)
    assert node.state_slot is None
    cache.insert(ints([1, 2, 3, 4]), ints([21, 22, 23, 24]), [checkpoint(4, 8)])
    cache.check()
    assert (node.state_slot, node.state_lock) == (8, 0)
    receipt.release_state()
    cache.unlock(receipt)
    cache.check()
    assert state_contents(cache) == {(1, 2, 3, 4): (8, "tail")}


def test_reset_needs_all_locks_back(cache):
    receipt = cache.lock_kv(cache.root)
    with pytest.raises(ValueError, match="1 locks are held"):
        cache.reset()
    assert cache.num_nodes == 3
    cache.unlock(receipt)
    node = node_at(cache, 7, 8)
    assert freed_sets(cache.reset()) == ([11, 12, 13, 14, 17, 18], [1, 2, 3])
    cache.check()
    assert cache.num_nodes == cache.num_kv_slots == cache.num_state_slots == 0
    with pytest.raises(ValueError, match="left the tree"):
        cache.lock(node)

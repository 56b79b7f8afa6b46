"""What is told about the states that leave the tree, and what nodes remember of their use."""

from __future__ import annotations

import time

import pytest

from hybrid_runtime.cache.eviction import make_orders
from hybrid_runtime.cache.radix_cache import RadixCache
from tests.cache.helpers import checkpoint, ints, prefix_of


class Witness:
    """Keeps what the tree shows of each node at the moment of its eviction."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.seen: list[tuple] = []

    def __call__(self, node):
        assert node.parent is not None
        kv_slots = self.cache.path_kv_slots(node).tolist()
        self.seen.append((self.cache.path_tokens(node).tolist(), kv_slots, node.state_slot, node.origin))


@pytest.fixture
def cache() -> RadixCache:
    """[1 2] (state 1) ─ [3 4] (state 2), and a sequence of its own, [7 8] (state 3)."""
    cache = RadixCache()
    cache.insert(ints([1, 2, 3, 4]), ints([11, 12, 13, 14]), [checkpoint(2, 1), checkpoint(4, 2, "final")])
    cache.insert(ints([7, 8]), ints([17, 18]), [checkpoint(2, 3)])
    return cache


def node_at(cache, *prefix):
    return next(node for node in cache.nodes() if prefix_of(node) == prefix)


def test_states_that_are_evicted_are_shown_with_their_whole_path(cache):
    cache.on_evict = witness = Witness(cache)
    cache.evict_state(1)
    assert witness.seen == [([1, 2], [11, 12], 1, "tail")]
    cache.evict_kv(99)
    assert witness.seen[1:] == [([1, 2, 3, 4], [11, 12, 13, 14], 2, "final"), ([7, 8], [17, 18], 3, "tail")]


def test_only_eviction_is_shown(cache):
    cache.on_evict = witness = Witness(cache)
    cache.insert(ints([1, 2]), ints([21, 22]), [checkpoint(2, 9)])  # a duplicate
    receipt = cache.lock_kv(node_at(cache, 7, 8))
    cache.evict_state(99)
    del witness.seen[:]
    cache.unlock(receipt)  # prunes a leaf without a state
    cache.insert(ints([1, 2]), ints([21, 22]), [checkpoint(2, 1)])
    cache.reset()
    assert witness.seen == []


def test_an_emptied_cache_keeps_policy_and_hook(cache):
    cache.on_evict = witness = Witness(cache)
    empty = cache.emptied()
    assert (empty.num_nodes, empty.on_evict) == (0, witness)
    empty.insert(ints([5]), ints([1]), [checkpoint(1, 1)])
    witness.cache = empty
    empty.evict_state(1)
    assert witness.seen == [([5], [1], 1, "tail")]


def test_paths_are_copies_and_end_with_the_node(cache):
    node = node_at(cache, 1, 2, 3, 4)
    for path, first in [(cache.path_tokens(node), 1), (cache.path_kv_slots(node), 11)]:
        assert path.dtype == "int32"
        assert path.tolist() == list(range(first, first + 4))
        path[:] = 99
    cache.check()
    assert cache.path_kv_slots(node).tolist() == [11, 12, 13, 14]
    for empty in (cache.path_tokens(cache.root), cache.path_kv_slots(cache.root)):
        assert (empty.dtype, len(empty)) == ("int32", 0)
    cache.evict_kv(99)
    for path_of in (cache.path_tokens, cache.path_kv_slots):
        with pytest.raises(ValueError, match="not in the tree"):
            path_of(node)


def test_a_hit_is_a_lock_of_the_state(cache):
    node = node_at(cache, 1, 2, 3, 4)
    cache.unlock(cache.lock_kv(node))
    assert node.num_hits == 0
    for _ in range(2):
        cache.unlock(cache.lock(node))
    assert (node.num_hits, node_at(cache, 1, 2).num_hits) == (2, 0)
    cache.insert(ints([1, 2, 3]), ints([21, 22, 23]), [checkpoint(3, 9)])  # splits the node
    assert (node.num_hits, node_at(cache, 1, 2, 3).num_hits) == (2, 0)


def test_uses_are_dated(cache):
    started = time.monotonic()
    upper, lower, other = node_at(cache, 1, 2), node_at(cache, 1, 2, 3, 4), node_at(cache, 7, 8)
    assert all(0 < node.last_used <= started for node in (upper, lower, other))
    receipt = cache.lock_kv(lower)
    assert all(started <= node.last_used for node in (upper, lower))
    assert other.last_used <= started
    locked = time.monotonic()
    cache.unlock(receipt)
    assert all(locked <= node.last_used for node in (upper, lower))
    before = time.monotonic()
    cache.insert(ints([1, 2]), ints([21, 22]), [checkpoint(2, 9)])
    assert lower.last_used <= before <= upper.last_used


class LeafReports:
    """Stands before an order and keeps which members were reported as leaves."""

    def __init__(self, order) -> None:
        self.order = order
        self.leaves: list[tuple] = []

    def became_leaf(self, node):
        assert node in list(self.order)
        assert not node.children
        self.leaves.append(prefix_of(node))

    def __getattr__(self, name):
        return getattr(self.order, name)

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def test_a_member_that_loses_its_last_child_is_reported(monkeypatch):
    reports = []

    def make(policy):
        kv_order, state_order = make_orders(policy)
        reports.append(LeafReports(kv_order))
        return reports[0], state_order

    monkeypatch.setattr("hybrid_runtime.cache.tree.make_orders", make)
    cache = RadixCache()
    [report] = reports
    for tokens, state in [([1, 2, 3], 1), ([1, 2, 4], 2), ([1], 3)]:
        cache.insert(ints(tokens), ints(range(10 * state, 10 * state + len(tokens))), [checkpoint(len(tokens), state)])
    receipt = cache.lock_kv(node_at(cache, 1, 2, 3))
    cache.unlock(receipt)
    cache.evict_kv(1)  # [1 2 4]: its parent has a child left
    assert report.leaves == []
    receipt = cache.lock_kv(node_at(cache, 1))
    cache.evict_kv(1)  # [1 2 3] and the tombstone [1 2]: [1] is locked and no member
    assert (report.leaves, cache.num_nodes) == ([], 1)
    cache.unlock(receipt)
    cache.insert(ints([1, 5]), ints([41, 42]), [checkpoint(2, 4)])
    cache.evict_kv(1)
    assert report.leaves == [(1,)]
    cache.check()

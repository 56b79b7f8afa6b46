"""Worked cases of match and insert: what is shared, split, revived, duplicated and refused."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_runtime.cache.radix_cache import RadixCache
from tests.cache.helpers import checkpoint, ints, kv_contents, prefix_of, state_contents


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache()


def put(cache, tokens, kv_slots, *checkpoints, protected_length=0):
    result = cache.insert(ints(tokens), ints(kv_slots), checkpoints, protected_length=protected_length)
    cache.check()
    return result


def test_an_empty_cache_matches_nothing(cache):
    match = cache.match(ints([1, 2, 3]))
    assert match.node is cache.root
    assert (match.state_length, match.kv_length, match.state_slot, match.origin) == (0, 0, None, None)
    assert match.kv_slots.dtype == np.int32
    assert len(match.kv_slots) == 0


@pytest.mark.parametrize("tokens", [[], [1]])
def test_nothing_can_be_reused_of_a_prompt_that_must_run_whole(cache, tokens):
    put(cache, [1, 2], [11, 12], checkpoint(1, 1))
    assert cache.match(ints(tokens)).kv_length == 0


def test_the_same_prompt_again_hits_its_tail_checkpoint_but_not_its_end(cache):
    put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(3, 5, "tail"), checkpoint(4, 6, "final"))
    again = cache.match(ints([1, 2, 3, 4]))
    assert (again.state_length, again.kv_length, again.state_slot, again.origin) == (3, 3, 5, "tail")
    assert again.kv_slots.tolist() == [11, 12, 13]
    longer = cache.match(ints([1, 2, 3, 4, 9]))
    assert (longer.state_length, longer.state_slot, longer.origin) == (4, 6, "final")


def test_with_a_state_only_at_the_end_the_same_prompt_hits_nothing(cache):
    put(cache, [1, 2, 3], [11, 12, 13], checkpoint(3, 5))
    match = cache.match(ints([1, 2, 3]))
    assert (match.state_length, match.kv_length) == (0, 2)
    assert match.node is cache.root


def test_match_reports_keys_that_agree_beyond_the_deepest_state(cache):
    put(cache, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15], checkpoint(2, 1), checkpoint(5, 2))
    match = cache.match(ints([1, 2, 3, 4, 9, 9]))
    assert (match.state_length, match.kv_length) == (2, 4)
    assert match.kv_slots.tolist() == [11, 12]
    assert prefix_of(match.node) == (1, 2)


def test_match_changes_nothing(cache):
    put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(4, 1))
    put(cache, [7, 8], [17, 18], checkpoint(2, 2))
    nodes = list(cache.nodes())
    cache.match(ints([1, 2, 9]))
    assert list(cache.nodes()) == nodes
    assert cache.evict_kv(1).kv_slots.tolist() == [11, 12, 13, 14]  # still the least recently used


def test_insert_keeps_kv_only_up_to_the_deepest_checkpoint(cache):
    result = put(cache, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15], checkpoint(3, 1))
    assert (result.kv_length, result.num_attached) == (3, 1)
    assert result.kv_slots.tolist() == [11, 12, 13]
    assert prefix_of(result.node) == (1, 2, 3)
    assert sorted(cache.owned_kv_slots().tolist()) == [11, 12, 13]


def test_insert_without_a_checkpoint_takes_nothing(cache):
    result = put(cache, [1, 2], [11, 12])
    assert result.node is cache.root
    assert (result.kv_length, result.num_attached, cache.num_nodes) == (0, 0, 0)
    assert len(result.kv_slots) == len(result.duplicate_kv_slots) == len(result.duplicate_state_slots) == 0


def test_insert_keeps_the_trees_slots_and_returns_the_callers(cache):
    put(cache, [1, 2, 3], [11, 12, 13], checkpoint(3, 1))
    result = put(cache, [1, 2, 3, 4], [21, 22, 23, 24], checkpoint(4, 2))
    assert result.kv_slots.tolist() == [11, 12, 13, 24]
    assert result.duplicate_kv_slots.tolist() == [21, 22, 23]
    assert cache.match(ints([1, 2, 3, 4, 5])).kv_slots.tolist() == [11, 12, 13, 24]


def test_slots_below_the_protected_length_are_never_returned(cache):
    put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(2, 1), checkpoint(4, 2))
    result = put(cache, [1, 2, 3, 9], [11, 12, 23, 24], checkpoint(4, 3), protected_length=2)
    assert result.kv_slots.tolist() == [11, 12, 13, 24]
    assert result.duplicate_kv_slots.tolist() == [23]


def test_a_checkpoint_may_lie_below_the_protected_length(cache):
    put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(4, 1))
    result = put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(2, 2), protected_length=4)
    assert (result.kv_length, result.num_attached) == (2, 1)
    assert len(result.duplicate_kv_slots) == 0


def test_sequences_that_part_inside_an_edge_share_a_tombstone(cache):
    put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(4, 1))
    put(cache, [1, 2, 8, 9], [21, 22, 28, 29], checkpoint(4, 2))
    assert kv_contents(cache) == {
        (1,): 11, (1, 2): 12, (1, 2, 3): 13, (1, 2, 3, 4): 14, (1, 2, 8): 28, (1, 2, 8, 9): 29,
    }  # fmt: skip
    assert {prefix_of(node) for node in cache.nodes()} == {(1, 2), (1, 2, 3, 4), (1, 2, 8, 9)}
    assert state_contents(cache) == {(1, 2, 3, 4): (1, "tail"), (1, 2, 8, 9): (2, "tail")}


def test_a_checkpoint_inside_an_edge_splits_it_there(cache):
    first = put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(4, 1))
    result = put(cache, [1, 2], [21, 22], checkpoint(2, 2, "junction"))
    assert first.node.parent is result.node
    assert result.duplicate_kv_slots.tolist() == [21, 22]
    assert state_contents(cache) == {(1, 2): (2, "junction"), (1, 2, 3, 4): (1, "tail")}


def test_a_tombstone_is_revived_at_exactly_its_length(cache):
    put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(4, 1))
    put(cache, [1, 2, 8, 9], [21, 22, 28, 29], checkpoint(4, 2))
    tombstone = next(node for node in cache.nodes() if node.state_slot is None)
    result = put(cache, [1, 2], [31, 32], checkpoint(2, 3, "junction"))
    assert result.node is tombstone
    match = cache.match(ints([1, 2, 5]))
    assert (match.state_length, match.state_slot, match.origin) == (2, 3, "junction")


def test_a_state_the_tree_has_already_goes_back_to_the_caller(cache):
    put(cache, [1, 2, 3], [11, 12, 13], checkpoint(3, 1, "tail"))
    result = put(cache, [1, 2, 3], [21, 22, 23], checkpoint(3, 2, "final"))
    assert result.num_attached == 0
    assert result.duplicate_state_slots.tolist() == [2]
    assert result.duplicate_kv_slots.tolist() == [21, 22, 23]
    assert state_contents(cache) == {(1, 2, 3): (1, "tail")}


def test_of_two_checkpoints_at_one_length_the_first_is_kept(cache):
    result = put(cache, [1, 2], [11, 12], checkpoint(2, 7, "hint"), checkpoint(2, 8, "tail"))
    assert result.duplicate_state_slots.tolist() == [8]
    assert state_contents(cache) == {(1, 2): (7, "hint")}


def test_checkpoints_come_in_any_order(cache):
    result = put(cache, [1, 2, 3, 4], [11, 12, 13, 14], checkpoint(4, 1), checkpoint(1, 2), checkpoint(3, 3))
    assert prefix_of(result.node) == (1, 2, 3, 4)
    assert state_contents(cache) == {(1,): (2, "tail"), (1, 2, 3): (3, "tail"), (1, 2, 3, 4): (1, "tail")}


def test_the_tree_does_not_see_later_writes_to_the_callers_arrays(cache):
    tokens, row = ints([1, 2, 3]), ints([11, 12, 13])
    result = cache.insert(tokens, row, [checkpoint(3, 1)])
    tokens[:] = row[:] = result.kv_slots[:] = 99
    cache.match(ints([1, 2, 3, 4])).kv_slots[:] = 99
    assert kv_contents(cache) == {(1,): 11, (1, 2): 12, (1, 2, 3): 13}


def test_a_chain_of_thousands_of_nodes(cache):
    length = 3000
    tokens = np.arange(length, dtype=np.int32)
    cache.insert(tokens, tokens + 1, [checkpoint(n, n) for n in range(1, length + 1)])
    assert cache.num_nodes == length
    match = cache.match(tokens)
    assert match.state_length == length - 1
    receipt = cache.lock(match.node)
    cache.check()
    freed = cache.evict_state(length)  # all but the locked one; the last node is an unlocked leaf and goes
    assert (len(freed.state_slots), freed.kv_slots.tolist()) == (length - 1, [length])
    assert len(cache.unlock(receipt).kv_slots) == 0
    assert len(cache.evict_kv(1).kv_slots) == length - 1
    assert cache.num_nodes == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoints": [checkpoint(0, 9)]}, "length 0"),
        ({"checkpoints": [checkpoint(2, 8), checkpoint(5, 9)]}, "length 5"),
        ({"checkpoints": [checkpoint(4, 0)]}, "no state slot"),
        ({"checkpoints": [checkpoint(1, 9), checkpoint(4, 9)]}, "one state slot in several"),
        ({"checkpoints": [checkpoint(3, 1)], "kv_slots": [11, 12, 13], "protected_length": 3}, "in the tree already"),
        ({"kv_slots": [21, 22, 23]}, "3 KV slots do not reach"),
        ({"kv_slots": [21, 22, 23, 0]}, "null slot"),
        ({"protected_length": -1}, "protected_length -1"),
        ({"protected_length": 5}, "protected_length 5"),
        ({"kv_slots": [11, 12, 13, 24], "protected_length": 4}, "only 3 are in the tree"),
        ({"protected_length": 2}, "not the tree's own"),
        ({"kv_slots": [11, 12, 13, 24], "protected_length": 2}, "protect them"),
        ({"kv_slots": np.array([21, 22, 23, 24])}, "int64"),
        ({"tokens": np.array([1, 2, 3, 9])}, "int64"),
    ],
)
def test_a_bad_insert_changes_nothing(cache, arguments, message):
    put(cache, [1, 2, 3], [11, 12, 13], checkpoint(3, 1))
    kv, states = kv_contents(cache), state_contents(cache)
    tokens = arguments.get("tokens", ints([1, 2, 3, 9]))
    kv_slots = arguments.get("kv_slots", ints([21, 22, 23, 24]))
    checkpoints = arguments.get("checkpoints", [checkpoint(2, 8), checkpoint(4, 9)])
    with pytest.raises(ValueError, match=message):
        cache.insert(
            tokens,
            ints(kv_slots) if isinstance(kv_slots, list) else kv_slots,
            checkpoints,
            protected_length=arguments.get("protected_length", 0),
        )
    assert (kv_contents(cache), state_contents(cache)) == (kv, states)
    cache.check()


def test_only_int32_vectors_are_matched(cache):
    with pytest.raises(ValueError, match="int64"):
        cache.match(np.array([1, 2]))
    with pytest.raises(ValueError, match="shape"):
        cache.match(ints([1, 2]).reshape(1, 2))


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="fifo"):
        RadixCache("fifo")

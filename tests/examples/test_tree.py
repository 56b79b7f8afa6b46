"""Sections 2.2, 2.3, 3.3 and 7.3 of the source document: what the tree holds, what eviction leaves, what locks keep."""

from __future__ import annotations

from hybrid_runtime.cache.radix_cache import RadixCache
from tests.cache.helpers import checkpoint, freed_sets, ints
from tests.examples.parts import (
    CODING_EXPERT,
    HELPFUL_ASSISTANT,
    SYSTEM,
    WRITE_CODE,
    YOU_ARE_A,
    edge,
    edges,
    letters,
    slots,
)

R1 = SYSTEM
R2 = SYSTEM + WRITE_CODE
R3 = YOU_ARE_A + CODING_EXPERT
ANY = (1,)  # a token more: the last one of a prompt is never looked up


def three_requests() -> RadixCache:
    """What R1, R2 and R3 leave, one after the other, in the document's slots."""
    cache = RadixCache("lru")
    cache.insert(ints(R1), ints(slots(10, 39)), [checkpoint(30, 5)])

    found = cache.match(ints(R2))
    receipt = cache.lock(found.node)
    receipt.release_state()  # copied
    own = slots(40, 50)
    cache.insert(ints(R2), ints([*found.kv_slots, *own]), [checkpoint(41, 8)], protected_length=found.state_length)
    cache.unlock(receipt)

    # R3 shares 10 tokens, and there is no state to resume from: it has computed these again, in slots 66 to 75.
    assert cache.match(ints(R3)).state_length == 0
    result = cache.insert(ints(R3), ints([*slots(66, 75), *slots(51, 65)]), [checkpoint(25, 12)])
    assert result.duplicate_kv_slots.tolist() == slots(66, 75)
    assert result.kv_slots.tolist() == slots(10, 19) + slots(51, 65)
    cache.check()
    return cache


def test_section_2_2_how_the_tree_stores_prefixes() -> None:
    """The document puts a prefix's whole KV, 10..39, at one node and none at the fork above it.

    A node holds the slots of its own edge, so the fork holds 10..19; it has no state, since nobody computed one there.
    """
    assert edges(three_requests()) == {
        edge(YOU_ARE_A, slots(10, 19)),
        edge(HELPFUL_ASSISTANT, slots(20, 39), 5, "tail"),
        edge(WRITE_CODE, slots(40, 50), 8, "tail"),
        edge(CODING_EXPERT, slots(51, 65), 12, "tail"),
    }


def test_section_2_3_a_tombstone() -> None:
    """The document evicts the state in slot 5, keeps the KV, and lets attention go on reusing it.

    The node stays and leads to what hangs below it, but a prompt that ends its match there skips nothing: the
    recurrent layers need all their inputs again, so attention runs again, too.
    """
    cache = three_requests()
    assert freed_sets(cache.evict_state(1)) == ([], [5])
    assert edge(HELPFUL_ASSISTANT, slots(20, 39)) in edges(cache)

    past_the_tombstone = cache.match(ints(R1 + ANY))
    assert (past_the_tombstone.kv_length, past_the_tombstone.state_length) == (30, 0)
    assert past_the_tombstone.kv_slots.tolist() == []
    through_it = cache.match(ints(R2 + ANY))
    assert (through_it.state_length, through_it.state_slot) == (41, 8)
    assert through_it.kv_slots.tolist() == slots(10, 50)
    cache.check()


def test_section_2_3_a_leaf_leaves_no_tombstone() -> None:
    """The document lets every evicted state leave a tombstone; a leaf's KV could serve nobody and goes along.

    So does the tombstone above it, which led nowhere else; the fork stays, since R3 hangs there.
    """
    cache = three_requests()
    cache.evict_state(1)
    assert freed_sets(cache.evict_state(1)) == (slots(20, 50), [8])
    assert edges(cache) == {edge(YOU_ARE_A, slots(10, 19)), edge(CODING_EXPERT, slots(51, 65), 12, "tail")}
    cache.check()


def test_section_2_3_a_tombstone_comes_back_to_life() -> None:
    """The document leaves tombstones at that; whoever computes the prefix again gives the node its state back."""
    cache = three_requests()
    cache.evict_state(1)
    result = cache.insert(ints(R1), ints(slots(80, 109)), [checkpoint(30, 6)])
    assert result.duplicate_kv_slots.tolist() == slots(80, 109)
    assert edge(HELPFUL_ASSISTANT, slots(20, 39), 6, "tail") in edges(cache)
    assert cache.match(ints(R1 + ANY)).state_length == 30


def test_section_3_3_two_orders_of_eviction() -> None:
    """The document's two LRU lists are independent, and so they are: a use refreshes a path's KV but one state only.

    It lets KV alone be evicted, too; what loses its KV loses its state with it.
    """
    cache = RadixCache("lru")
    cache.insert(ints(letters("AB")), ints([10, 11]), [checkpoint(2, 1)])
    cache.insert(ints(letters("ABCD")), ints([10, 11, 12, 13]), [checkpoint(4, 2)], protected_length=2)
    cache.insert(ints(letters("EF")), ints([20, 21]), [checkpoint(2, 3)])
    cache.unlock(cache.lock(cache.match(ints(letters("ABCDX"))).node))

    # Of the states AB's is the oldest; of the KV that of EF, since AB's was used on the way to ABCD.
    assert freed_sets(cache.evict_state(1)) == ([], [1])
    assert freed_sets(cache.evict_kv(1)) == ([20, 21], [3])
    assert edges(cache) == {edge(letters("AB"), [10, 11]), edge(letters("CD"), [12, 13], 2, "tail")}
    cache.check()


def test_section_7_3_a_lock_keeps_the_path() -> None:
    """The document counts locks per node: locked is not evictable, unlocked is, and a state lock implies a KV lock.

    All of that holds. The KV lock is on the whole path; of the states on it only the one resumed from is locked.
    """
    cache = three_requests()
    receipt = cache.lock(cache.match(ints(R2 + ANY)).node)
    locks = {node.length: (node.kv_lock, node.state_lock) for node in cache.nodes()}
    assert locks == {10: (1, 0), 30: (1, 0), 41: (1, 1), 25: (0, 0)}
    assert all(node.kv_lock >= node.state_lock for node in cache.nodes())

    assert freed_sets(cache.evict_kv(1000)) == (slots(51, 65), [12])
    assert freed_sets(cache.evict_state(1000)) == ([], [5])
    assert freed_sets(cache.unlock(receipt)) == ([], [])
    assert freed_sets(cache.evict_kv(1000)) == (slots(10, 50), [8])
    cache.check()


def test_section_7_3_the_state_lock_ends_first() -> None:
    """The document holds both locks until the request is done, which would pin a state per running request.

    The state is free to go once it is copied; the KV stays until the request ends, and goes then if nothing needs it.
    """
    cache = RadixCache("lru")
    cache.insert(ints(R1), ints(slots(10, 39)), [checkpoint(30, 5)])
    receipt = cache.lock(cache.match(ints(R1 + ANY)).node)
    assert freed_sets(cache.evict_state(1)) == ([], [])
    receipt.release_state()
    assert freed_sets(cache.evict_state(1)) == ([], [5])
    assert freed_sets(cache.evict_kv(1000)) == ([], [])
    cache.check()
    assert freed_sets(cache.unlock(receipt)) == (slots(10, 39), [])
    assert edges(cache) == set()


def test_section_7_3_a_split_under_a_lock() -> None:
    """The document decrements the counts on the path from a node; a split in between must not unbalance them.

    Here a receipt is given back. R3 splits the edge that R1 holds, and all counts are zero in the end.
    """
    cache = RadixCache("lru")
    cache.insert(ints(R1), ints(slots(10, 39)), [checkpoint(30, 5)])
    receipt = cache.lock(cache.match(ints(R1 + ANY)).node)
    cache.insert(ints(R3), ints([*slots(66, 75), *slots(51, 65)]), [checkpoint(25, 12)])
    assert {node.length: node.kv_lock for node in cache.nodes()} == {10: 1, 30: 1, 25: 0}
    cache.check()
    cache.unlock(receipt)
    assert {node.length: node.kv_lock for node in cache.nodes()} == {10: 0, 30: 0, 25: 0}
    cache.check()

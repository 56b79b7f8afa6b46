"""The invariants of the radix tree, recomputed from its nodes and from the receipts that are held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from hybrid_runtime.cache.eviction import EvictionOrder
from hybrid_runtime.cache.lru import LRUOrder
from hybrid_runtime.cache.marks import marks_of, tokens_since_mark
from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.receipt import LockReceipt
from hybrid_runtime.cache.tree import RadixTree


def check_tree(tree: RadixTree, receipts: Collection[LockReceipt]) -> None:
    """Raises `AssertionError` at the first invariant that does not hold. O(tokens in the tree)."""
    nodes = list(tree.nodes())
    _check_root(tree.root)
    for node in nodes:
        _check_links(node)
        _check_contents(node)
    _check_slots_distinct(nodes)
    _check_marks(tree.root, nodes)
    _check_locks(tree, nodes, receipts)
    _check_counters(tree, nodes)
    _check_order(tree.kv_order, [node for node in nodes if node.kv_lock == 0])
    _check_order(tree.state_order, [node for node in nodes if node.state_slot is not None and node.state_lock == 0])
    kv_victim = tree.kv_order.victim()
    assert kv_victim is None or not kv_victim.children, f"{kv_victim} would be evicted before its children"
    if isinstance(tree.kv_order, LRUOrder):
        _check_descendants_first(tree.kv_order)


def _check_root(root: Node) -> None:
    assert root.parent is None
    assert root.length == len(root.key) == len(root.kv_slots) == 0
    assert root.state_slot is None
    assert root.origin is None
    for first_token, child in root.children.items():
        assert child.parent is root
        assert first_token == child.key[0]


def _check_links(node: Node) -> None:
    assert node.parent is not None
    assert node.parent.children[int(node.key[0])] is node
    for first_token, child in node.children.items():
        assert child.parent is node, f"{child} does not point back to {node}"
        assert first_token == child.key[0], f"{child} is filed under token {first_token}"


def _check_contents(node: Node) -> None:
    assert node.parent is not None
    assert len(node.key) == len(node.kv_slots) > 0, f"{node} has {len(node.kv_slots)} KV slots"
    assert node.length == node.parent.length + len(node.key), f"{node} ends at a wrong length"
    assert (node.state_slot is None) == (node.origin is None)
    if node.state_slot is None:
        assert node.state_lock == 0, f"{node} is locked without a state"
        assert node.children or node.kv_lock > 0, f"{node} is a leaf that nothing needs"


def _check_slots_distinct(nodes: list[Node]) -> None:
    kv_slots = np.concatenate([np.zeros(1, dtype=np.int32), *(node.kv_slots for node in nodes)])
    assert len(np.unique(kv_slots)) == len(kv_slots), "a KV slot occurs twice or is the null slot"
    state_slots = [node.state_slot for node in nodes if node.state_slot is not None]
    assert len({0, *state_slots}) == len(state_slots) + 1, "a state slot occurs twice or is the null slot"


def _check_marks(root: Node, nodes: list[Node]) -> None:
    ends = {root: 0}
    assert root.mark == 0
    for node in nodes:
        assert node.parent is not None
        before = ends[node.parent]
        ends[node] = [before, *marks_of(tokens_since_mark(node.parent.length, node), before)][-1]
        assert node.mark in (None, ends[node]), f"{node} has a wrong mark"


def _check_locks(tree: RadixTree, nodes: list[Node], receipts: Collection[LockReceipt]) -> None:
    num_receipts = Counter(receipt.node for receipt in receipts)
    num_state_receipts = Counter(receipt.node for receipt in receipts if receipt.holds_state)
    for node in [tree.root, *nodes]:
        expected = num_receipts[node] + sum(child.kv_lock for child in node.children.values())
        assert node.kv_lock == expected, f"{node} should have {expected} KV locks"
        assert node.state_lock == num_state_receipts[node], f"{node} should have {num_state_receipts[node]} state locks"
        assert node.kv_lock >= node.state_lock >= 0
    assert num_receipts.keys() <= {tree.root, *nodes}, "a receipt is held on a node that left the tree"


def _check_counters(tree: RadixTree, nodes: list[Node]) -> None:
    def total(measure: Callable[[Node], int]) -> int:
        return sum(measure(node) for node in nodes)

    assert tree.num_nodes == len(nodes)
    assert tree.num_kv_slots == total(lambda node: len(node.key))
    assert tree.num_evictable_kv == total(lambda node: len(node.key) * (node.kv_lock == 0))
    assert tree.num_state_slots == total(lambda node: node.state_slot is not None)
    assert tree.num_evictable_states == total(lambda node: node.state_slot is not None and node.state_lock == 0)


def _check_order(order: EvictionOrder, expected: list[Node]) -> None:
    members = list(order)
    assert len(members) == len(order) == len(expected)
    assert set(members) == set(expected)
    victim = order.victim()
    assert victim in members if members else victim is None


def _check_descendants_first(kv_order: LRUOrder) -> None:
    passed: set[Node] = set()
    for node in kv_order:
        assert passed.issuperset(node.children.values()), f"{node} would be evicted before its children"
        passed.add(node)

"""The radix tree's mechanics: links, splits, lock counts, eviction orders and the counters that follow from them.

Each method keeps its own bookkeeping right; which of them make up an operation of the cache is `RadixCache`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from hybrid_runtime.cache.eviction import make_orders
from hybrid_runtime.cache.node import Node, TokenArray
from hybrid_runtime.cache.results import SlotCollector, join_slots
from hybrid_runtime.memory.slots import SlotArray, StateSlot, no_slots

_TOKEN_BYTES = np.dtype(np.int32).itemsize


@dataclass(frozen=True, eq=False)
class Walk:
    """Nodes whose keys agree with a token sequence, from the root's child down; the last one perhaps only in part."""

    nodes: list[Node]
    length: int

    def kv_slots(self, length: int) -> SlotArray:
        """The tree's slots of the first `length <= self.length` tokens, int32 `[length]`, a copy."""
        parts: list[SlotArray] = []
        covered = 0
        for node in self.nodes:
            if covered >= length:
                break
            parts.append(node.kv_slots)
            covered = node.length
        return join_slots(parts)[:length]


class RadixTree:
    """Nodes below an empty root. Owns the KV and state slots its nodes hold; gives them up to a `SlotCollector`."""

    def __init__(self, policy: str) -> None:
        self.root = Node(None, np.empty(0, dtype=np.int32), no_slots())
        self.kv_order, self.state_order = make_orders(policy)
        self.num_nodes = 0
        self.num_kv_slots = 0
        self.num_evictable_kv = 0
        self.num_state_slots = 0
        self.num_evictable_states = 0
        self._new_nodes: set[Node] = set()

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def __contains__(self, node: Node) -> bool:
        """Whether a node that was once in this tree still is. O(1): removed nodes lose their parent."""
        return node is self.root or node.parent is not None

    def path(self, node: Node) -> list[Node]:
        """The nodes from the root's child down to `node`. Raises `ValueError` if it is no longer in the tree."""
        if node not in self:
            raise ValueError(f"not in the tree any more: {node}")
        nodes: list[Node] = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def walk(self, tokens: TokenArray) -> Walk:
        """Follows `tokens` as far as the keys agree. Read-only; each byte of them is copied and compared about once."""
        data = tokens.tobytes()
        nodes: list[Node] = []
        children, length, num_tokens = self.root.children, 0, len(tokens)
        while length < num_tokens and (child := children.get(tokens.item(length))) is not None:
            nodes.append(child)
            if not data.startswith(child.key_bytes, length * _TOKEN_BYTES):
                return Walk(nodes, length + child.shared_length(tokens[length:]))
            children, length = child.children, child.length
        return Walk(nodes, length)

    def extend(self, walk: Walk, tokens: TokenArray, kv_slots: SlotArray, ends: Sequence[int]) -> list[Node]:
        """The nodes that end at exactly `tokens[:end]` for each of the rising `ends`, made by splitting or appending.

        `walk` is the tree's for at least these tokens. Of `kv_slots` (one per token) only those of tokens that are not
        in the tree yet are taken. New nodes enter no order before `use_path`.
        """
        found: list[Node] = []
        node, following = self.root, iter(walk.nodes)
        child = next(following, None)
        for end in ends:
            while node.length < end:
                if child is None or node.length == walk.length:
                    child = None
                    node = self._append(node, tokens[node.length : end], kv_slots[node.length : end])
                elif child.length <= min(end, walk.length):
                    node, child = child, next(following, None)
                else:
                    node = self._split(child, min(end, walk.length) - node.length)
            found.append(node)
        return found

    def _append(self, parent: Node, key: TokenArray, kv_slots: SlotArray) -> Node:
        node = Node(parent, key, kv_slots)
        parent.children[key.item(0)] = node
        self.num_nodes += 1
        self.num_kv_slots += len(key)
        self.num_evictable_kv += len(key)
        self._new_nodes.add(node)
        return node

    def _split(self, lower: Node, at: int) -> Node:
        """Cuts an edge after `at` tokens of its key; returns the new upper node, a tombstone.

        The lower node keeps its identity, state, receipts and recency. Every KV lock on it runs through the upper
        node too, which therefore starts with the same count.
        """
        parent, key, kv_slots = lower.parent, lower.key, lower.kv_slots
        assert parent is not None
        assert 0 < at < len(key)
        upper = Node(parent, key[:at], kv_slots[:at])
        upper.kv_lock = lower.kv_lock
        parent.children[key.item(0)] = upper
        lower.set_edge(key[at:], kv_slots[at:])
        lower.parent = upper
        upper.children[key.item(at)] = lower
        self.num_nodes += 1
        self._new_nodes.add(upper)
        return upper

    def use_path(self, node: Node) -> None:
        """Makes the KV of `node` and its ancestors the most recently used, among them all nodes that are new."""
        now = monotonic()
        while node.parent is not None:
            node.last_used = now
            if node.kv_lock == 0:
                if node in self._new_nodes:
                    self.kv_order.add(node)
                else:
                    self.kv_order.touch(node)
            node = node.parent
        self._new_nodes.clear()

    def attach_state(self, node: Node, state_slot: StateSlot, origin: str) -> None:
        assert node is not self.root
        assert node.state_slot is None
        node.state_slot = state_slot
        node.origin = origin
        self.num_state_slots += 1
        self.num_evictable_states += 1
        self.state_order.add(node)

    def touch_state(self, node: Node) -> None:
        if node.state_lock == 0:
            self.state_order.touch(node)

    def drop_state(self, node: Node, collector: SlotCollector) -> None:
        """Takes an unlocked state off its node. Leaves a tombstone, which the caller prunes if nothing needs it."""
        assert node.state_slot is not None
        assert node.state_lock == 0
        collector.add_state(node.state_slot)
        self.state_order.forget(node)
        node.state_slot = None
        node.origin = None
        self.num_state_slots -= 1
        self.num_evictable_states -= 1

    def lock_state(self, node: Node) -> None:
        if node.state_lock == 0:
            self.state_order.remove(node)
            self.num_evictable_states -= 1
        node.state_lock += 1
        node.num_hits += 1

    def unlock_state(self, node: Node) -> None:
        """A state whose last lock goes was in use until now: it becomes the most recently used."""
        node.state_lock -= 1
        node.last_used = monotonic()
        if node.state_lock == 0:
            self.state_order.add(node)
            self.num_evictable_states += 1

    def lock_path(self, node: Node) -> None:
        now = monotonic()
        while node.parent is not None:
            node.last_used = now
            if node.kv_lock == 0:
                self.kv_order.remove(node)
                self.num_evictable_kv -= len(node.kv_slots)
            node.kv_lock += 1
            node = node.parent
        node.kv_lock += 1

    def unlock_path(self, node: Node) -> None:
        """KV whose last lock goes was in use until now: it becomes the most recently used, ancestors last."""
        now = monotonic()
        while node.parent is not None:
            node.last_used = now
            node.kv_lock -= 1
            if node.kv_lock == 0:
                self.kv_order.add(node)
                self.num_evictable_kv += len(node.kv_slots)
            node = node.parent
        node.kv_lock -= 1

    def evict_leaf(self, leaf: Node, collector: SlotCollector) -> None:
        """Gives up an unlocked leaf's state and KV, then what only led to it."""
        assert not leaf.children, f"the eviction order chose {leaf}"
        assert leaf.kv_lock == 0, f"the eviction order chose {leaf}"
        if leaf.state_slot is not None:
            self.drop_state(leaf, collector)
        self.prune(leaf, collector)

    def prune(self, node: Node, collector: SlotCollector) -> None:
        """Removes `node` and then its ancestors for as long as they are childless, stateless and unlocked."""
        first = node
        while node.parent is not None and not node.children and node.state_slot is None and node.kv_lock == 0:
            parent = node.parent
            self.kv_order.forget(node)
            del parent.children[int(node.key[0])]
            node.parent = None
            collector.add_kv(node.kv_slots)
            self.num_nodes -= 1
            self.num_kv_slots -= len(node.kv_slots)
            self.num_evictable_kv -= len(node.kv_slots)
            node = parent
        if node is not first and node.parent is not None and not node.children and node.kv_lock == 0:
            self.kv_order.became_leaf(node)

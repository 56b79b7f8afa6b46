"""The prefix cache: which token sequences have KV, at which lengths a state, and who is using them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hybrid_runtime.cache.check import check_tree
from hybrid_runtime.cache.node import Node, TokenArray
from hybrid_runtime.cache.receipt import LockReceipt
from hybrid_runtime.cache.results import (
    Checkpoint,
    FreedSlots,
    InsertResult,
    PrefixMatch,
    SlotCollector,
    join_slots,
)
from hybrid_runtime.cache.tree import RadixTree, Walk
from hybrid_runtime.cache.validation import deepest_length, require_count, require_disjoint, require_int32_vector
from hybrid_runtime.memory.slots import SlotArray, no_slots


class RadixCache:
    """A radix tree over token sequences whose nodes own KV slots and, at some lengths, state slots.

    It deals in indices and never calls an allocator: what an operation gives up it returns, and the caller releases
    it. No operation's cost depends on the size of the pools. On the number of nodes off its own path it depends as much
    as the policy's orders do: with `lru` not at all, with `cost` logarithmically.
    """

    def __init__(self, policy: str = "lru", *, on_evict: Callable[[Node], None] | None = None) -> None:
        """`on_evict` is called with the node of each state that eviction is about to take from the tree.

        It sees the node with its path, slots and origin still in place. It must not change the tree, nor raise: the
        slots that the same call evicted before would be lost.
        """
        self.on_evict = on_evict
        self._policy = policy
        self._tree = RadixTree(policy)
        self._receipts: set[LockReceipt] = set()

    def match(self, tokens: TokenArray) -> PrefixMatch:
        """Deepest cached prefix at which KV and a state both exist. Read-only; O(len(tokens)) bytes compared.

        Looks at `tokens[:-1]` (int32 `[L]`): the last token must run to give logits.
        """
        require_int32_vector("tokens", tokens)
        walk = self._tree.walk(tokens[:-1])
        for node in reversed(walk.nodes):
            if node.state_slot is not None and node.length <= walk.length:
                return PrefixMatch(
                    state_length=node.length,
                    kv_length=walk.length,
                    node=node,
                    state_slot=node.state_slot,
                    kv_slots=walk.kv_slots(node.length),
                    origin=node.origin,
                )
        return PrefixMatch(0, walk.length, self._tree.root, None, no_slots(), None)

    def lock(self, node: Node) -> LockReceipt:
        """Keeps the KV from the root to `node`, and the state at `node` if there is one, from eviction.

        The lock counts as a use of both up to the moment it is released; other states on the path are not refreshed.
        Cost O(nodes on the path). Raises `ValueError` if `node` is no longer in the tree.
        """
        return self._lock(node, with_state=node.state_slot is not None)

    def lock_kv(self, node: Node) -> LockReceipt:
        """As `lock`, but leaves the state at `node` evictable and its recency as it was."""
        return self._lock(node, with_state=False)

    def _lock(self, node: Node, *, with_state: bool) -> LockReceipt:
        if node not in self._tree:
            raise ValueError(f"cannot lock a node that has left the tree: {node}")
        self._tree.lock_path(node)
        if with_state:
            self._tree.lock_state(node)
        receipt = LockReceipt(self._tree, node, holds_state=with_state)
        self._receipts.add(receipt)
        return receipt

    def unlock(self, receipt: LockReceipt) -> FreedSlots:
        """Undoes a lock and frees what only it kept: childless, stateless, unlocked nodes from its node upwards.

        Raises `ValueError` if the receipt was used before or is another cache's.
        """
        if receipt not in self._receipts:
            raise ValueError(f"no lock is held with this receipt on {receipt.node}")
        self._receipts.remove(receipt)
        receipt.release_state()
        self._tree.unlock_path(receipt.node)
        collector = SlotCollector()
        self._tree.prune(receipt.node, collector)
        return collector.freed()

    def insert(
        self,
        tokens: TokenArray,
        kv_slots: SlotArray,
        checkpoints: Sequence[Checkpoint],
        *,
        protected_length: int = 0,
    ) -> InsertResult:
        """Takes states at their lengths, and the KV up to the deepest of them, into the tree.

        `tokens` and `kv_slots` are int32, one slot per token, at least as far as the deepest checkpoint (`kv_length`).
        The slots below `protected_length` are the tree's own, under a lock of the caller; those above are the caller's.
        Afterwards the tree owns the slots of tokens and the states that it did not have; the duplicates in the result
        are the caller's to release, and the slots from `kv_length` on stay its own. All KV on the path counts as used,
        and of the states those at the checkpoints' lengths, the deepest last.

        Cost O(kv_length) bytes compared and copied, and O(nodes on the path).

        Raises `ValueError`, and changes nothing, if a length is out of range, if the tree's slots below
        `protected_length` are not the given ones, or if a slot that is to be taken or returned is the tree's already.
        """
        kv_length = deepest_length(tokens, kv_slots, checkpoints, protected_length)
        if kv_length == 0:
            return InsertResult(self._tree.root, 0, no_slots(), no_slots(), no_slots(), 0)
        tokens, kv_slots = tokens[:kv_length], kv_slots[:kv_length]
        walk = self._tree.walk(tokens)
        own_kv_slots = walk.kv_slots(walk.length)
        require_disjoint(walk, own_kv_slots, kv_slots, checkpoints, min(protected_length, kv_length))

        checkpoints = sorted(checkpoints, key=lambda checkpoint: checkpoint.length)
        nodes = self._tree.extend(walk, tokens, kv_slots, [checkpoint.length for checkpoint in checkpoints])
        duplicates: list[int] = []
        for node, checkpoint in zip(nodes, checkpoints, strict=True):
            if node.state_slot is None:
                self._tree.attach_state(node, checkpoint.state_slot, checkpoint.origin)
            else:
                self._tree.touch_state(node)
                duplicates.append(checkpoint.state_slot)
        self._tree.use_path(nodes[-1])
        return InsertResult(
            node=nodes[-1],
            kv_length=kv_length,
            kv_slots=np.concatenate([own_kv_slots, kv_slots[walk.length :]]),
            duplicate_kv_slots=kv_slots[protected_length : walk.length].copy(),
            duplicate_state_slots=np.array(duplicates, dtype=np.int32),
            num_attached=len(checkpoints) - len(duplicates),
        )

    def evict_kv(self, n: int) -> FreedSlots:
        """Evicts unlocked leaves, KV and state together, until `n` KV slots are freed or no leaf is left.

        Ancestors that only led to such a leaf go with it. Cost O(nodes evicted).
        """
        require_count(n)
        collector = SlotCollector()
        while collector.num_kv < n and (leaf := self._tree.kv_order.victim()) is not None:
            if self.on_evict is not None and leaf.state_slot is not None:
                self.on_evict(leaf)
            self._tree.evict_leaf(leaf, collector)
        return collector.freed()

    def evict_state(self, n: int) -> FreedSlots:
        """Evicts unlocked states until `n` are freed or none is left. Cost O(nodes evicted).

        An inner node or one with locked KV keeps its KV; an unlocked leaf goes as in `evict_kv`.
        """
        require_count(n)
        collector = SlotCollector()
        while collector.num_states < n and (node := self._tree.state_order.victim()) is not None:
            if self.on_evict is not None:
                self.on_evict(node)
            self._tree.drop_state(node, collector)
            self._tree.prune(node, collector)
        return collector.freed()

    def reset(self) -> FreedSlots:
        """Empties the cache. Raises `ValueError`, and changes nothing, while any lock is held."""
        if self._receipts:
            raise ValueError(f"cannot reset the cache while {len(self._receipts)} locks are held")
        freed = FreedSlots(self.owned_kv_slots(), self.owned_state_slots())
        for node in list(self.nodes()):
            node.parent = None
        self._tree = RadixTree(self._policy)
        return freed

    def emptied(self) -> RadixCache:
        """A new, empty cache with the same policy and `on_evict`; this one is not to be used any more."""
        return RadixCache(self._policy, on_evict=self.on_evict)

    @property
    def root(self) -> Node:
        return self._tree.root

    @property
    def num_nodes(self) -> int:
        """Nodes without the root."""
        return self._tree.num_nodes

    @property
    def num_kv_slots(self) -> int:
        return self._tree.num_kv_slots

    @property
    def num_evictable_kv(self) -> int:
        """KV slots of nodes without a KV lock; `evict_kv` can free all of them."""
        return self._tree.num_evictable_kv

    @property
    def num_protected_kv(self) -> int:
        return self._tree.num_kv_slots - self._tree.num_evictable_kv

    @property
    def num_state_slots(self) -> int:
        return self._tree.num_state_slots

    @property
    def num_evictable_states(self) -> int:
        """States without a state lock; `evict_state` can free all of them."""
        return self._tree.num_evictable_states

    @property
    def num_protected_states(self) -> int:
        return self._tree.num_state_slots - self._tree.num_evictable_states

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children. For checks and rendering."""
        return self._tree.nodes()

    def walk(self, tokens: TokenArray) -> Walk:
        """All that the tree has of `tokens` (int32 `[L]`), the last one and KV beyond states included. Read-only."""
        return self._tree.walk(tokens)

    def path_tokens(self, node: Node) -> TokenArray:
        """Tokens from the root to `node`, int32 `[node.length]`, a copy. Raises `ValueError` if it left the tree."""
        keys = bytearray().join([each.key_bytes for each in self._tree.path(node)])
        return np.frombuffer(keys, dtype=np.int32)

    def path_kv_slots(self, node: Node) -> SlotArray:
        """KV slots of those tokens, int32 `[node.length]`, a copy. Raises `ValueError` if `node` left the tree."""
        return join_slots([each.kv_slots for each in self._tree.path(node)])

    def owned_kv_slots(self) -> SlotArray:
        """All KV slots in the tree, int32, in no particular order. O(nodes)."""
        return join_slots([node.kv_slots for node in self.nodes()])

    def owned_state_slots(self) -> SlotArray:
        """All state slots in the tree, int32, in no particular order. O(nodes)."""
        return np.array([node.state_slot for node in self.nodes() if node.state_slot is not None], dtype=np.int32)

    def check(self) -> None:
        """Asserts every invariant of the tree by recomputing it. O(tokens in the tree)."""
        check_tree(self._tree, self._receipts)

"""Evicts what is expected to save the least work for the room it takes."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_runtime.cache.lazy_heap import LazyHeap
from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.reuse import ReuseHistory


class CostStateOrder:
    """Greedy-dual over states: priority = clock + chance x tokens, where

    - `clock` is the priority of the last victim. It makes those grow old that are not used: a state is kept while the
      clock travels a distance that is proportional to what it is worth (Cao and Irani, 1997).
    - `chance` is the learned chance that the state is used again (`ReuseHistory`), in place of the count of its uses.
      A conversation's last turn is used once, by the next turn, and then never: its one use is no promise.
    - `tokens` is what a hit would compute in its absence: those back to the nearest ancestor whose state has at least
      the same chance. An ancestor with less is no substitute, since it will be gone first.

    A state that the clock would overtake before half of the mean time to the next use of its kind (measured by the
    same clock) would be kept for nothing: its priority is the clock, and it is the next to go.

    Priorities are set when a state arrives or is used, and when a request that resumed from it leaves one of its own.
    Priorities and clock scale with the unit of length, so that decisions do not depend on it. O(log states) and
    O(nodes and tokens back to the state resumed from) per operation.
    """

    def __init__(self, history: ReuseHistory) -> None:
        self._history = history
        self._heap = LazyHeap()
        self.clock = 0.0

    def value(self, node: Node) -> float:
        """What a member is worth at this moment: its priority, if it were set now, less the clock."""
        records = self._history.records
        kind = records[node].kind
        chance, above = kind.chance, node.parent
        while above is not None and ((record := records.get(above)) is None or record.kind.chance < chance):
            above = above.parent
        value = chance * (node.length - (0 if above is None else above.length))
        return value if value >= kind.mean_wait / 2 else 0.0

    def priority(self, node: Node) -> float:
        return self._heap.priority(node)

    def add(self, node: Node) -> None:
        if node in self._history.records:
            self._history.used(node, self.clock)  # only a lock takes a state out of the order and leaves it in the tree
        else:
            source = self._history.arrived(node, self.clock)
            if source is not None and source in self._heap:
                self.touch(source)
        self.touch(node)

    def touch(self, node: Node) -> None:
        self._heap.set(node, self.clock + self.value(node))

    def remove(self, node: Node) -> None:
        self._heap.discard(node)

    def forget(self, node: Node) -> None:
        if self._heap.first() is node:
            self.clock = self._heap.priority(node)
        self._heap.discard(node)
        self._history.evicted(node)

    def became_leaf(self, node: Node) -> None:
        """Nothing to do: inner states are evicted, too."""

    def victim(self) -> Node | None:
        return self._heap.first()

    def __iter__(self) -> Iterator[Node]:
        """The members, the next victim first."""
        return iter(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


class CostKVOrder:
    """Greedy-dual over the leaves' KV: priority = clock when it was last used + chance of the leaf's state.

    A KV slot holds one token and saves the work of one, so that length cancels out and what remains is the chance of
    use, and age. (Were the chance a constant, the order would be that of LRU.) Members with children wait for theirs to
    go: an inner node is used whenever one below it is, so that it is soon next when it has become a leaf.
    """

    def __init__(self, history: ReuseHistory) -> None:
        self._history = history
        self._used_at: dict[Node, float] = {}
        self._leaves = LazyHeap()
        self.clock = 0.0

    def value(self, leaf: Node) -> float:
        """What it is worth at this moment. A leaf without a state is about to be pruned."""
        record = self._history.records.get(leaf)
        return 0.0 if record is None else record.kind.chance

    def priority(self, leaf: Node) -> float:
        return self._leaves.priority(leaf)

    def add(self, node: Node) -> None:
        self._used_at[node] = self.clock
        if node.children:
            self._leaves.discard(node)
        else:
            self._leaves.set(node, self.clock + self.value(node))

    def touch(self, node: Node) -> None:
        self.add(node)

    def remove(self, node: Node) -> None:
        del self._used_at[node]
        self._leaves.discard(node)

    def forget(self, node: Node) -> None:
        if self._leaves.first() is node:
            self.clock = max(self.clock, self._leaves.priority(node))
        self.remove(node)

    def became_leaf(self, node: Node) -> None:
        self._leaves.set(node, self._used_at[node] + self.value(node))

    def victim(self) -> Node | None:
        return self._leaves.first()

    def __iter__(self) -> Iterator[Node]:
        """The members, the next victim first and those with children last."""
        yield from self._leaves
        yield from (node for node in self._used_at if node not in self._leaves)

    def __len__(self) -> int:
        return len(self._used_at)


def make_cost_orders() -> tuple[CostKVOrder, CostStateOrder]:
    """The orders of KV and of states, which share what they learn."""
    history = ReuseHistory()
    return CostKVOrder(history), CostStateOrder(history)

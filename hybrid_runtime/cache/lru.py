"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from hybrid_runtime.cache.node import Node


class LRUOrder:
    """A linked list with an index: every operation is O(1).

    The KV order needs no leaf test: a use covers a node and all its ancestors, the deepest first, so an ancestor is
    always younger than its descendants and the oldest member is a leaf.
    """

    def __init__(self) -> None:
        self._members: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        self._members[node] = None

    def touch(self, node: Node) -> None:
        self._members.move_to_end(node)

    def remove(self, node: Node) -> None:
        del self._members[node]

    def forget(self, node: Node) -> None:
        self.remove(node)

    def became_leaf(self, node: Node) -> None:
        """Nothing to do: a leaf's place is its recency."""

    def victim(self) -> Node | None:
        return next(iter(self._members), None)

    def __iter__(self) -> Iterator[Node]:
        """The members, the next victim first."""
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

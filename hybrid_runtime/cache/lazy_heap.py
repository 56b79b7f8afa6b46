"""Nodes ordered by a number that changes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hybrid_runtime.cache.node import Node

_SLACK = 16
_Entry = tuple[float, int, Node]
"""Priority, number in the order of setting, and the member that it belonged or belongs to."""


class LazyHeap:
    """The member with the lowest priority first, of equal ones the one whose priority was set first.

    A changed or removed member leaves its old entry in the heap, to be dropped when it comes up. Once these outnumber
    the members all are dropped, so the heap is never longer than twice the members and a constant, and every operation
    costs O(log members), amortised.
    """

    def __init__(self) -> None:
        self._current: dict[Node, _Entry] = {}
        self._entries: list[_Entry] = []
        self._num_set = 0

    @property
    def num_entries(self) -> int:
        """Length of the heap, with the entries that are out of date."""
        return len(self._entries)

    def set(self, node: Node, priority: float) -> None:
        """Makes `node` a member, or changes its priority; it then comes after its equals."""
        self._num_set += 1  # no two entries share a number, so nodes are never compared
        self._current[node] = entry = priority, self._num_set, node
        heapq.heappush(self._entries, entry)
        self._tidy()

    def discard(self, node: Node) -> None:
        """Ends the membership of `node`, if it is a member."""
        if self._current.pop(node, None) is not None:
            self._tidy()

    def priority(self, node: Node) -> float:
        return self._current[node][0]

    def first(self) -> Node | None:
        while self._entries:
            entry = self._entries[0]
            node = entry[2]
            if self._current.get(node) is entry:
                return node
            heapq.heappop(self._entries)
        return None

    def _tidy(self) -> None:
        if len(self._entries) > 2 * len(self._current) + _SLACK:
            self._entries = list(self._current.values())
            heapq.heapify(self._entries)

    def __contains__(self, node: object) -> bool:
        return node in self._current

    def __iter__(self) -> Iterator[Node]:
        """The members, the first one first. O(members log members)."""
        return iter(sorted(self._current, key=self._current.__getitem__))

    def __len__(self) -> int:
        return len(self._current)

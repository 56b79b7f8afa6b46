"""A memory of what was evicted: only its name, to be able to say that it once was there."""

from __future__ import annotations

from collections import OrderedDict

from hybrid_runtime.cache import marks
from hybrid_runtime.cache.marks import mark_of, marks_of, tokens_since_mark
from hybrid_runtime.cache.node import Node, TokenArray

DEFAULT_CAPACITY = 4096


class GhostIndex:
    """The names of the prefixes whose states were evicted last, at most `capacity` of them.

    A name is the mark (`hybrid_runtime.cache.marks`) and the tokens since, as bytes. Two prefixes may share one; what
    an answer is used for must allow that.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._members: OrderedDict[tuple[int, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._members)

    def remember(self, node: Node) -> None:
        """Notes that the state at `node` is being evicted. O(tokens since the nearest node whose mark is known)."""
        member = mark_of(node), tokens_since_mark(node.length, node)
        self._members[member] = None
        self._members.move_to_end(member)
        if len(self._members) > self._capacity:
            self._members.popitem(last=False)

    def longest(self, tokens: TokenArray) -> int:
        """Length of the longest prefix of `tokens` that is remembered; 0 if none is. O(L + members)."""
        data, interval = tokens.tobytes(), marks.MARK_INTERVAL * tokens.itemsize
        starts = {mark: number * interval for number, mark in enumerate([0, *marks_of(data)])}
        # All members are looked at, which is done for misses only; an index by mark would cost at each eviction.
        ends = (
            starts[mark] + len(rest)
            for mark, rest in self._members
            if mark in starts and data.startswith(rest, starts[mark])
        )
        return max(ends, default=0) // tokens.itemsize

    def clear(self) -> None:
        self._members.clear()

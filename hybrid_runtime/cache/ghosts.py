"""A memory of what was evicted: only its name, to be able to say that it once was there."""

from __future__ import annotations

from collections import OrderedDict

from hybrid_runtime.cache import marks
from hybrid_runtime.cache.marks import mark_of, marks_of, tokens_since_mark
from hybrid_runtime.cache.node import Node, TokenArray

DEFAULT_CAPACITY = 4096


class GhostIndex:
    """The names of the prefixes whose states were evicted last, at most `capacity` of them.

    A name is the mark (`hybrid_runtime.cache.marks`) and the tokens since. Two prefixes may share one; what an answer
    is used for must allow that.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._members: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._by_mark: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def remember(self, node: Node) -> None:
        """Notes that the state at `node` was evicted. O(tokens since the nearest node whose mark is known)."""
        member = (mark_of(node), tokens_since_mark(node.length, node).tobytes())
        if member in self._members:
            self._members.move_to_end(member)
            return
        self._members[member] = None
        mark, rest = member
        self._by_mark.setdefault(mark, set()).add(rest)
        if len(self._members) > self._capacity:
            (mark, rest), _ = self._members.popitem(last=False)
            self._by_mark[mark].remove(rest)
            if not self._by_mark[mark]:
                del self._by_mark[mark]

    def longest(self, tokens: TokenArray) -> int:
        """Length of the longest prefix of `tokens` that is remembered; 0 if none is. O(L + members)."""
        if not self._members:
            return 0
        data = tokens.tobytes()
        for number, mark in reversed(list(enumerate([0, *marks_of(tokens)]))):
            start = number * marks.MARK_INTERVAL
            rests = self._by_mark.get(mark, ())
            found = [len(rest) for rest in rests if data.startswith(rest, start * tokens.itemsize)]
            if found:
                return start + max(found) // tokens.itemsize
        return 0

    def clear(self) -> None:
        self._members.clear()
        self._by_mark.clear()

"""How likely a state is to be used again, learned from what became of earlier ones like it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from hybrid_runtime.cache.marks import mark_of, marked_length, marks_between
from hybrid_runtime.cache.node import Node

GHOSTS_PER_STATE = 8
"""Evicted states remembered for each state that the tree ever held at once."""
MEMORY = 500
"""States of one kind after which what was learned about it counts half."""


class Kind:
    """States that are expected to behave alike. Starts as if one of two had been used again, at once."""

    __slots__ = ("_num_states", "_num_uses", "_sum_waits", "chance")

    def __init__(self) -> None:
        self._num_states = 2.0
        self._num_uses = 1.0
        self._sum_waits = 0.0
        self.chance = 0.5
        """Share of these states that were used again, in the tree or after they had been evicted."""

    @property
    def mean_wait(self) -> float:
        """How far the clock went, on average, until that use."""
        return self._sum_waits / self._num_uses

    def count_state(self) -> None:
        self._num_states += 1
        if self._num_states > MEMORY:
            self._num_states /= 2
            self._num_uses /= 2
            self._sum_waits /= 2
        self.chance = self._num_uses / self._num_states

    def uncount_state(self) -> None:
        """A state that was counted turned out to be of another kind."""
        self._num_states = max(self._num_states - 1, self._num_uses)
        self.chance = self._num_uses / self._num_states

    def count_use(self, wait: float) -> None:
        self._num_uses += 1
        self._num_states = max(self._num_states, self._num_uses)
        self._sum_waits += wait
        self.chance = self._num_uses / self._num_states


@dataclass(slots=True)
class Record:
    """What is known of a state: `since` is the clock at its last use, `used` whether it was resumed from.

    `known` is how many of its tokens were known before its request.
    """

    kind: Kind
    since: float
    used: bool
    known: int

    def change_kind(self, kind: Kind) -> None:
        self.kind.uncount_state()
        self.kind = kind
        kind.count_state()


@dataclass(slots=True)
class _Ghost:
    """An evicted state; `kind` is None once its next use has been counted. `length` is that of its mark."""

    kind: Kind | None
    since: float
    length: int

    def count_use(self, now: float) -> None:
        """Its prefix was asked for again. Only the first time is a use: after that the state is back."""
        if self.kind is not None:
            self.kind.count_use(now - self.since)
            self.kind = None


class ReuseHistory:
    """Sorts states into kinds and counts for each kind how many were used again, and after how long.

    The kind of a state nobody resumed from yet: its origin, and how much of its tokens is known from before, that is,
    from the state that its request resumed from or from an evicted state among its prefixes: less than half, less than
    three quarters, or more. The next turn of a conversation is mostly known; it comes back more often than a prompt
    that is mostly new. The kind of a state that was resumed from: its origin, and how much of the state that its
    request left behind it covers; none if no request left one. A turn that a longer turn has overtaken is hardly ever
    used again; a prefix that many prompts share is.

    Evicted states stay in a bounded index of fingerprints. Without it, only the kinds that are being kept could show
    that they are used again, and a returning conversation would look like a new one.

    Times are those of the caller's clock. Memory is O(states that were in the tree at once).
    """

    def __init__(self) -> None:
        self.records: dict[Node, Record] = {}
        """Of the states that have arrived. For others to read."""
        self._kinds: defaultdict[tuple[Hashable, ...], Kind] = defaultdict(Kind)
        self._ghosts: OrderedDict[int, _Ghost] = OrderedDict()
        self._max_ghosts = 0

    def __len__(self) -> int:
        return len(self.records)

    @property
    def num_ghosts(self) -> int:
        return len(self._ghosts)

    def arrived(self, node: Node, now: float) -> Node | None:
        """A state was attached to `node`. Returns the node that its request resumed from, which changed its kind.

        O(tokens and nodes between the two).
        """
        above, source = self._nearest(node)
        record = self.records.get(above)
        # A state nobody resumed from, above a new one, was left by the same request.
        known = above.length if record is None or above is source else record.known
        ghost_length = self._count_return(above, node, now)
        if ghost_length:
            known = ghost_length
        if source is not None:
            self.records[source].change_kind(self._kinds[source.origin, _closeness(source.length, node.length)])
        if ghost_length and ghost_length == marked_length(node.length):
            kind = self._kinds[node.origin, None]
        else:
            kind = self._kinds[node.origin, "new", _closeness(known, node.length)]
        kind.count_state()
        self.records[node] = Record(kind, now, False, known)
        return source

    def used(self, node: Node, now: float) -> None:
        """A request resumed from the state at `node`. O(1)."""
        record = self.records[node]
        record.kind.count_use(now - record.since)
        record.since = now
        record.used = True
        record.kind = self._kinds[node.origin, None]
        record.kind.count_state()

    def evicted(self, node: Node) -> None:
        """The state at `node` is leaving the tree. O(tokens since the nearest node whose mark is known)."""
        self._max_ghosts = max(self._max_ghosts, GHOSTS_PER_STATE * len(self.records))
        record, mark = self.records.pop(node), mark_of(node)
        self._ghosts[mark] = _Ghost(record.kind, record.since, marked_length(node.length))
        self._ghosts.move_to_end(mark)
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def _nearest(self, node: Node) -> tuple[Node, Node | None]:
        """The nearest ancestor with a state, or the root, and the nearest whose state some request resumed from."""
        above: Node | None = None
        while node.parent is not None:
            node = node.parent
            record = self.records.get(node)
            if record is not None:
                above = above or node
                if record.used or node.state_lock > 0:
                    return above, node
        return above or node, None

    def _count_return(self, above: Node, node: Node, now: float) -> int:
        """Counts a use of the longest evicted state among the prefixes of `node` that are longer than `above`.

        Returns its length, rounded down to a mark; 0 if there is none.
        """
        if not self._ghosts:
            return 0  # where nothing was evicted, no token is hashed
        marks = marks_between(above, node)
        found = next(filter(self._ghosts.__contains__, reversed(marks)), None)  # no step of Python for each mark
        if found is None:
            return 0
        ghost = self._ghosts[found]
        ghost.count_use(now)
        return ghost.length


def _closeness(known: int, length: int) -> int:
    """0, 1 or 2: less than half, less than three quarters, or more of `length` tokens is known."""
    new = length - known
    return (2 * new <= length) + (4 * new <= length)

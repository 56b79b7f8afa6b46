"""What a picture of the cache shows: plain data between the radix tree and the two outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Totals:
    """Counts of a set of tree nodes. A node without a state is a tombstone."""

    num_nodes: int = 0
    num_tokens: int = 0
    num_states: int = 0
    num_hits: int = 0
    num_locked_nodes: int = 0
    num_locked_tokens: int = 0
    num_locked_states: int = 0

    @property
    def num_tombstones(self) -> int:
        return self.num_nodes - self.num_states

    @classmethod
    def sum(cls, parts: Iterable[Totals]) -> Totals:
        columns = zip(*(part._as_tuple() for part in parts), strict=True)
        return cls(*map(sum, columns))

    def _as_tuple(self) -> tuple[int, ...]:
        return (
            self.num_nodes,
            self.num_tokens,
            self.num_states,
            self.num_hits,
            self.num_locked_nodes,
            self.num_locked_tokens,
            self.num_locked_states,
        )


@dataclass(frozen=True)
class State:
    """A checkpoint: its slot, why it was kept, and how many requests hold a lock on it."""

    slot: int
    origin: str
    num_locks: int


@dataclass(frozen=True)
class Edge:
    """One line of the picture: the tokens `[start, length)` and what is known at their end.

    Usually one node of the tree; `num_nodes > 1` is a chain of tombstones that nothing branches off. `text` is what
    the tokens say, on one line and without control characters. `age` is in seconds since the last use. `own` counts
    the nodes of this line, `below` these and all that hang below them, whether shown or not.
    """

    start: int
    length: int
    text: str
    state: State | None
    num_kv_locks: int
    age: float
    own: Totals
    below: Totals

    @property
    def num_nodes(self) -> int:
        return self.own.num_nodes

    @property
    def num_tokens(self) -> int:
        return self.length - self.start

    @property
    def num_hits(self) -> int:
        return self.own.num_hits


@dataclass(frozen=True)
class Branch:
    """Edges that follow each other without a fork, then what the last one leads to, the most useful first.

    `children` are for showing; `folded` are for showing on demand; `num_absent` more branches, which hold `absent`,
    are not in the picture. `depth` is the number of forks above. Where only the front of a branch is for showing, the
    back is its one folded or absent branch, of the same depth.
    """

    depth: int
    edges: tuple[Edge, ...]
    children: tuple[Branch, ...] = ()
    folded: tuple[Branch, ...] = ()
    num_absent: int = 0
    absent: Totals = Totals()

    @property
    def below(self) -> Totals:
        return self.edges[0].below

    @property
    def left_out(self) -> tuple[int, Totals]:
        """How many branches that end this one are not for showing at once, and what they hold."""
        totals = Totals.sum([self.absent, *(branch.below for branch in self.folded)])
        return self.num_absent + len(self.folded), totals

    @property
    def has_rest(self) -> bool:
        """Whether what is left out takes a line of its own. Where that is all that follows an edge, it is marked."""
        return self.left_out[0] > 0 and (bool(self.children) or not self.edges)


@dataclass(frozen=True)
class Picture:
    """The whole tree: `top` holds the branches at the root and has no edges itself."""

    totals: Totals
    top: Branch
    max_length: int
    """Tokens from the root to the deepest node."""

"""From the radix tree to its picture: sums, the choice of what is worth showing, and the picture's branches.

All passes are loops: the tree may be thousands of nodes deep.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log2

import numpy as np

from hybrid_runtime.cache.node import Node, TokenArray
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.inspection.picture import Branch, Edge, Picture, State, Totals

_STEP_PAST_FORK, _STEP_ALONG_BRANCH = 1.0, 0.5
_MAX_NESTING = 100  # forks on a path: browsers give up on pages nested a few hundred deep

_NOTHING = Totals()
_Rank = tuple[int, float, int, int]


@dataclass(frozen=True)
class Limits:
    """How much of the tree a picture holds.

    `max_lines`: edges for showing, plus one line for the rest of each fork that is shown in part. `max_depth`: forks
    above such an edge. `max_folded`: further edges, for showing on demand.
    """

    max_lines: int
    max_depth: int
    max_folded: int = 0


@dataclass(eq=False, slots=True)
class _Item:
    """One edge to be: a node, or a chain of tombstones. `rank` sorts siblings, the most useful first."""

    nodes: list[Node]
    parent: _Item | None
    depth: int = -1
    children: list[_Item] = field(default_factory=list)
    own: Totals = _NOTHING
    below: Totals = _NOTHING
    last_used: float = 0.0
    rank: _Rank = (0, 0.0, 0, 0)
    num_shown: int = 0
    is_shown: bool = False
    is_kept: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether exactly one edge follows, which then continues the same branch."""
        return self.parent is not None and len(self.children) == 1

    def has_rest_line(self, num_more: int) -> bool:
        """Whether a line sums up children that are not shown, once `num_more` more are.

        An edge of which no child is shown is marked instead; the root has no line to mark.
        """
        num_shown = self.num_shown + num_more
        return num_shown < len(self.children) and (num_shown > 0 or self.parent is None)


def take_picture(cache: RadixCache, limits: Limits, *, label: Callable[[TokenArray], str], now: float) -> Picture:
    """The tree as it is now, cut down to `limits`. Read-only.

    `label` writes the tokens of an edge, on one line; it is asked for edges in the picture only. `now` is a time of
    `time.monotonic`. O(n log n) for n nodes, with a small part in the log.
    """
    items = _items(cache)
    for item in reversed(items):
        _measure(item)
    root, *rest = items
    for item in rest:
        assert item.parent is not None
        item.depth = item.parent.depth + (not item.parent.goes_on)
    chosen = _choose(root, limits)
    max_length = max((item.nodes[-1].length for item in rest), default=0)
    return Picture(root.below, _branches(root, chosen, label, now), max_length)


def _items(cache: RadixCache) -> list[_Item]:
    """The root, then all edges, each after the one above it."""
    root = _Item([], None)
    items = [root]
    item_of: dict[Node, _Item] = {cache.root: root}
    for node in cache.nodes():
        assert node.parent is not None
        item = item_of[node.parent]
        if _is_chain(node.parent, node):
            item.nodes.append(node)
        else:
            item = _Item([node], item)
            items.append(item)
        item_of[node] = item
    for item in items[1:]:
        assert item.parent is not None
        item.parent.children.append(item)
    return items


def _is_chain(upper: Node, lower: Node) -> bool:
    """Whether two nodes say the same in two pieces: tombstones with nothing in between, under the same locks."""
    return (
        upper.parent is not None
        and len(upper.children) == 1
        and upper.state_slot is None
        and lower.state_slot is None
        and upper.kv_lock == lower.kv_lock
    )


def _measure(item: _Item) -> None:
    """Sums of an item whose children have theirs."""
    nodes = item.nodes
    is_locked = bool(nodes) and nodes[-1].kv_lock > 0
    num_tokens = sum(len(node.key) for node in nodes)
    item.own = Totals(
        num_nodes=len(nodes),
        num_tokens=num_tokens,
        num_states=sum(node.state_slot is not None for node in nodes),
        num_hits=sum(node.num_hits for node in nodes),
        num_locked_nodes=len(nodes) * is_locked,
        num_locked_tokens=num_tokens * is_locked,
        num_locked_states=sum(node.state_lock > 0 for node in nodes),
    )
    item.below = Totals.sum([item.own, *(child.below for child in item.children)])
    item.last_used = max(
        itertools.chain((node.last_used for node in nodes), (child.last_used for child in item.children)), default=0.0
    )
    first_token = int(nodes[0].key[0]) if nodes else 0
    item.rank = (-item.below.num_hits, -item.last_used, -item.below.num_tokens, first_token)


def _choose(root: _Item, limits: Limits) -> list[_Item]:
    """Marks the items of the picture, the best first; returns them, each after the one above it.

    An item costs a step more than the one above it, and the k-th best of a fork's branches log2(k) more than its
    best: so the lines go to many families and into the depth of the best at once. What needs more lines than are left
    is folded, as is what is deeper than `max_depth`, which comes last.
    """
    chosen: list[_Item] = []
    serial = itertools.count()  # no two entries compare equal
    heap: list[tuple[bool, float, _Rank, int, _Item]] = []

    def offer_children(item: _Item, cost: float) -> None:
        step = _STEP_ALONG_BRANCH if item.goes_on else _STEP_PAST_FORK
        for position, child in enumerate(sorted(item.children, key=_rank), start=1):
            if child.depth < _MAX_NESTING:
                entry = (child.depth >= limits.max_depth, cost + step + log2(position), child.rank, next(serial), child)
                heapq.heappush(heap, entry)

    offer_children(root, 0.0)
    root.is_shown = True
    num_lines = int(root.has_rest_line(0))
    num_folded = 0
    while heap:
        is_too_deep, cost, _, _, item = heapq.heappop(heap)
        assert item.parent is not None
        num_new_lines = 1 + item.parent.has_rest_line(1) - item.parent.has_rest_line(0)
        if item.parent.is_shown and not is_too_deep and num_lines + num_new_lines <= limits.max_lines:
            num_lines += num_new_lines
            item.parent.num_shown += 1
            item.is_shown = True
        elif num_folded < limits.max_folded:
            num_folded += 1
        else:
            continue
        item.is_kept = True
        chosen.append(item)
        offer_children(item, cost)
    return chosen


def _rank(item: _Item) -> _Rank:
    return item.rank


@dataclass(eq=False, slots=True)
class _Draft:
    """A branch in the making, its edges in reverse."""

    edges: list[Edge]
    children: tuple[Branch, ...]
    folded: tuple[Branch, ...]
    num_absent: int
    absent: Totals

    def branch(self, depth: int) -> Branch:
        return Branch(depth, tuple(reversed(self.edges)), self.children, self.folded, self.num_absent, self.absent)


def _branches(root: _Item, chosen: list[_Item], label: Callable[[TokenArray], str], now: float) -> Branch:
    drafts: dict[_Item, _Draft] = {}
    for item in reversed(chosen):
        only = item.children[0] if item.goes_on else None
        if only is not None and only.is_kept and only.is_shown == item.is_shown:
            draft = drafts.pop(only)
        else:
            draft = _new_draft(item, drafts)
        draft.edges.append(_edge(item, label, now))
        drafts[item] = draft
    return _new_draft(root, drafts).branch(root.depth)


def _new_draft(item: _Item, drafts: dict[_Item, _Draft]) -> _Draft:
    """The end of a branch below `item`, whose children's drafts it takes over."""
    kept = sorted((child for child in item.children if child.is_kept), key=_rank)
    absent = [child for child in item.children if not child.is_kept]
    branches = [(child.is_shown, drafts.pop(child).branch(child.depth)) for child in kept]
    return _Draft(
        edges=[],
        children=tuple(branch for child_is_shown, branch in branches if child_is_shown == item.is_shown),
        folded=tuple(branch for child_is_shown, branch in branches if child_is_shown != item.is_shown),
        num_absent=len(absent),
        absent=Totals.sum(child.below for child in absent),
    )


def _edge(item: _Item, label: Callable[[TokenArray], str], now: float) -> Edge:
    nodes = item.nodes
    end = nodes[-1]
    tokens = end.key if len(nodes) == 1 else np.concatenate([node.key for node in nodes])
    state = None
    if end.state_slot is not None:
        state = State(int(end.state_slot), str(end.origin), end.state_lock)
    return Edge(
        start=nodes[0].start,
        length=end.length,
        text=label(tokens),
        state=state,
        num_kv_locks=end.kv_lock,
        age=max(0.0, now - max(node.last_used for node in nodes)),
        own=item.own,
        below=item.below,
    )

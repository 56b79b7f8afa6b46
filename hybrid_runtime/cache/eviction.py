"""The seam between the tree, which knows what may be evicted, and a policy, which knows in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from hybrid_runtime.cache.cost import make_cost_orders
from hybrid_runtime.cache.lru import LRUOrder
from hybrid_runtime.cache.node import Node


class EvictionOrder(Protocol):
    """Nodes that may give something up, ordered by when they should. The tree keeps one for KV and one for states.

    Members of the KV order are the nodes with `kv_lock == 0`, of the state order those with a state and
    `state_lock == 0`. Whatever is used is used with all its ancestors, and the tree reports the deepest node first.
    """

    def add(self, node: Node) -> None:
        """`node` became evictable just now. It may be new, or its last lock was released."""

    def touch(self, node: Node) -> None:
        """A member was used."""

    def remove(self, node: Node) -> None:
        """A member was locked."""

    def forget(self, node: Node) -> None:
        """A member's KV or state is leaving the tree: its slots are wanted, or nothing needs it any more."""

    def became_leaf(self, node: Node) -> None:
        """A member of the KV order lost its last child, and stays."""

    def victim(self) -> Node | None:
        """The member to evict next, which stays a member. Of the KV order it has no children."""

    def __iter__(self) -> Iterator[Node]:
        """All members, each once, in no particular order. For checks."""

    def __len__(self) -> int: ...


_ORDERS: dict[str, Callable[[], tuple[EvictionOrder, EvictionOrder]]] = {
    "cost": make_cost_orders,
    "lru": lambda: (LRUOrder(), LRUOrder()),
}


def make_orders(policy: str) -> tuple[EvictionOrder, EvictionOrder]:
    """The orders of KV and of states under a policy. Raises `ValueError` for an unknown name."""
    if policy not in _ORDERS:
        raise ValueError(f"eviction policy must be one of {sorted(_ORDERS)}, got {policy!r}")
    return _ORDERS[policy]()

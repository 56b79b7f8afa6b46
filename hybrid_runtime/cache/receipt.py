"""Proof of a lock, needed to undo it."""

from __future__ import annotations

from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.tree import RadixTree


class LockReceipt:
    """Keeps the path to `node`, and at first the state there if it was locked too, from being evicted.

    Splits below or above don't matter: the part of a split node that ends where this lock does stays `node`.
    """

    __slots__ = ("_holds_state", "_tree", "node")

    def __init__(self, tree: RadixTree, node: Node, *, holds_state: bool) -> None:
        self._tree = tree
        self.node = node
        self._holds_state = holds_state

    @property
    def holds_state(self) -> bool:
        return self._holds_state

    def release_state(self) -> None:
        """Lets the state be evicted again, e.g. once its copy has been issued. May be called any number of times."""
        if self._holds_state:
            self._holds_state = False
            self._tree.unlock_state(self.node)

"""One edge of the radix tree together with the node at its lower end."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.memory.slots import SlotArray, StateSlot

TokenArray: TypeAlias = NDArray[np.int32]
"""Token ids, int32 `[L]`."""


class Node:
    """Tokens `key` that follow the parent's, one KV slot for each, and possibly the state after the last of them.

    `length` is the number of tokens from the root to this node's end, which is what a state here is exact for. A node
    without a state is a tombstone. The key is kept as `key_bytes`, int32 in native order, so that it can be compared as
    memory. The fields are written by `RadixTree` alone, but for `mark`.

    `num_hits` counts how often the state here was locked, that is, resumed from; it survives the state's eviction.
    `last_used` is when KV or state here were last used, in seconds of `time.monotonic`. `mark` belongs to
    `hybrid_runtime.cache.marks`: None until it is asked for, and true for as long as the node is in the tree, because
    what precedes a node's end never changes.
    """

    __slots__ = (
        "children",
        "key_bytes",
        "kv_lock",
        "kv_slots",
        "last_used",
        "length",
        "mark",
        "num_hits",
        "origin",
        "parent",
        "state_lock",
        "state_slot",
    )

    def __init__(self, parent: Node | None, key: TokenArray, kv_slots: SlotArray) -> None:
        """Copies both arrays, so that a node never keeps a caller's larger buffer alive."""
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.set_edge(key, kv_slots)
        self.length: int = len(key) + (parent.length if parent is not None else 0)
        self.state_slot: StateSlot | None = None
        self.origin: str | None = None
        self.mark: int | None = 0 if parent is None else None
        self.kv_lock = 0
        self.state_lock = 0
        self.num_hits = 0
        self.last_used = 0.0

    def set_edge(self, key: TokenArray, kv_slots: SlotArray) -> None:
        self.key_bytes = key.tobytes()
        self.kv_slots: SlotArray = kv_slots.copy()

    @property
    def key(self) -> TokenArray:
        """The edge's tokens, int32, read-only."""
        return np.frombuffer(self.key_bytes, dtype=np.int32)

    @property
    def start(self) -> int:
        """Number of tokens before this node's key."""
        return self.length - len(self.kv_slots)

    def shared_length(self, tokens: TokenArray) -> int:
        """How many leading tokens `key` and `tokens` have in common. O(len(key)) bytes compared."""
        window = tokens[: len(self.kv_slots)]
        if self.key_bytes.startswith(window.tobytes()):
            return len(window)
        return int((self.key[: len(window)] != window).argmax())

    def __repr__(self) -> str:
        return (
            f"Node([{self.start}, {self.length}), state_slot={self.state_slot}, origin={self.origin!r}, "
            f"kv_lock={self.kv_lock}, state_lock={self.state_lock}, {len(self.children)} children)"
        )

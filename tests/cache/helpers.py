"""Short ways to write sequences and to read a cache back, for the tests of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hybrid_runtime.cache.eviction import _ORDERS
from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint, FreedSlots
from hybrid_runtime.memory.slots import StateSlot

Prefix = tuple[int, ...]
POLICIES = sorted(_ORDERS)


def ints(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def checkpoint(length: int, state_slot: int, origin: str = "tail") -> Checkpoint:
    return Checkpoint(length, StateSlot(state_slot), origin)


def prefix_of(node: Node) -> Prefix:
    """The tokens from the root to the node's end."""
    keys: list[list[int]] = []
    while node.parent is not None:
        keys.append(node.key.tolist())
        node = node.parent
    return tuple(token for key in reversed(keys) for token in key)


def kv_contents(cache: RadixCache) -> dict[Prefix, int]:
    """The KV slot of each token in the tree, by the prefix that ends with it."""
    contents = {}
    for node in cache.nodes():
        prefix = prefix_of(node)
        for offset, slot in enumerate(node.kv_slots.tolist(), start=1):
            contents[prefix[: node.start + offset]] = slot
    return contents


def state_contents(cache: RadixCache) -> dict[Prefix, tuple[int, str | None]]:
    """State slot and origin of each state in the tree, by its prefix."""
    return {prefix_of(node): (node.state_slot, node.origin) for node in cache.nodes() if node.state_slot is not None}


def freed_sets(freed: FreedSlots) -> tuple[list[int], list[int]]:
    return sorted(freed.kv_slots.tolist()), sorted(freed.state_slots.tolist())

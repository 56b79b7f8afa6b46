"""What a cache has of a token sequence, whether or not it could be resumed from there. Read-only."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_runtime.cache.node import Node, TokenArray
from hybrid_runtime.cache.radix_cache import RadixCache


@dataclass(frozen=True)
class Evictable:
    """Slots of both pools that the cache could give up."""

    num_kv: int
    num_states: int


def evictable_at(node: Node) -> Evictable:
    """What a lock of `node` would keep from being evicted that nothing keeps yet. O(nodes on the path)."""
    num_states = int(node.state_slot is not None and node.state_lock == 0)
    num_kv = 0
    above: Node | None = node
    while above is not None and above.kv_lock == 0:  # whatever is above a locked node is locked
        num_kv += len(above.key)
        above = above.parent
    return Evictable(num_kv, num_states)


def checkpoint_at_end(cache: RadixCache, tokens: TokenArray) -> Node | None:
    """The node of the state after exactly `tokens`, if there is one."""
    walk = cache.walk(tokens)
    if walk.length < len(tokens) or walk.nodes[-1].length > walk.length or walk.nodes[-1].state_slot is None:
        return None
    return walk.nodes[-1]


def deepest_whole_node(cache: RadixCache, tokens: TokenArray) -> Node:
    """The deepest node that ends on the path of `tokens`; the root if none does."""
    walk = cache.walk(tokens)
    return next((node for node in reversed(walk.nodes) if node.length <= walk.length), cache.root)

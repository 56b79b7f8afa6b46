"""The trees of the prefix cache as flat arrays, for a file.

Shapes: T tokens, N nodes, C checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.cache.node import Node, TokenArray
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint, join_slots
from hybrid_runtime.memory.slots import SlotArray, StateSlot
from hybrid_runtime.scheduling.supply import SlotSupply

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class CacheIndex:
    """Nodes, parents before children, and where the states are; int32 arrays.

    Node i adds `lengths[i]` tokens to those of node `parents[i] < i` (-1: to nothing); `tokens` are all nodes' in their
    order. State c belongs to the end of node `checkpoints[c]` and has the origin `origins[c]`; the most useful comes
    first.
    """

    tokens: TokenArray  # [T]
    parents: Ints  # [N]
    lengths: Ints  # [N]
    checkpoints: Ints  # [C]
    origins: tuple[str, ...]  # [C]

    def rows(self, checkpoint: int) -> NDArray[np.int64]:
        """Places in `tokens` of the path to a checkpoint, from the root on."""
        starts = self.starts
        parts = []
        node = int(self.checkpoints[checkpoint])
        while node >= 0:
            parts.append(np.arange(starts[node], starts[node] + self.lengths[node]))
            node = int(self.parents[node])
        return np.concatenate(parts[::-1])

    def fault(self) -> str | None:
        """What keeps these arrays from being a radix tree; None if nothing does."""
        num_nodes = len(self.parents)
        if len(self.lengths) != num_nodes or len(self.origins) != len(self.checkpoints):
            return "arrays of different lengths"
        if (self.lengths < 1).any() or self.lengths.sum(dtype=np.int64) != len(self.tokens):
            return "edges that do not add up to the tokens"
        if (self.parents < -1).any() or (self.parents >= np.arange(num_nodes)).any():
            return "a node before its parent"
        if (self.checkpoints < 0).any() or (self.checkpoints >= num_nodes).any():
            return "a state of no node"
        if len(np.unique(self.checkpoints)) != len(self.checkpoints):
            return "two states of one node"
        first_tokens = self.tokens[self.starts]
        if np.unique(np.stack([self.parents, first_tokens]), axis=1).shape[1] != num_nodes:
            return "siblings that start with the same token"
        if (self.tokens < 0).any() or not all(self.origins):
            return "a negative token or a state without an origin"
        return None

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Place of each node's first token in `tokens`, `[N]`."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths


@dataclass(frozen=True, eq=False)
class MergedSlots:
    """Where the contents of an index are: slots of several pools, numbered through one pool after the other."""

    kv: SlotArray  # [T]
    states: SlotArray  # [C]


def merge_trees(supplies: Sequence[SlotSupply]) -> tuple[CacheIndex, MergedSlots]:
    """All checkpoints and the KV before them, each once: what an earlier tree has is taken from there.

    Slot s of the second pool is numbered s + the first one's number of slots, and so on.
    """
    merged = RadixCache()
    last_used: dict[int, float] = {}
    kv_offset = state_offset = 0
    for supply in supplies:
        _add_tree(merged, supply.cache, kv_offset, state_offset, last_used)
        kv_offset += supply.kv.num_slots
        state_offset += supply.states.num_slots
    nodes = list(merged.nodes())
    places = {node: place for place, node in enumerate(nodes)} | {merged.root: -1}
    holders = [node for node in nodes if node.state_slot is not None]
    holders.sort(key=lambda node: -last_used[node.state_slot or 0])
    index = CacheIndex(
        tokens=join_slots([node.key for node in nodes]),
        parents=_ints(places[node.parent or merged.root] for node in nodes),
        lengths=_ints(len(node.key) for node in nodes),
        checkpoints=_ints(places[node] for node in holders),
        origins=tuple(node.origin or "" for node in holders),
    )
    states = _ints(node.state_slot or 0 for node in holders)
    return index, MergedSlots(join_slots([node.kv_slots for node in nodes]), states)


def _add_tree(
    merged: RadixCache, cache: RadixCache, kv_offset: int, state_offset: int, last_used: dict[int, float]
) -> None:
    """Inserts what `cache` has and `merged` has not, by its numbers in `merged`; notes when each state was used."""
    added: set[Node] = set()
    for leaf in [node for node in cache.nodes() if not node.children]:
        checkpoints = []
        node: Node | None = leaf
        while node is not None:
            if node.state_slot is not None and node not in added:
                slot = StateSlot(node.state_slot + state_offset)
                assert node.origin is not None
                checkpoints.append(Checkpoint(node.length, slot, node.origin))
                last_used[slot] = node.last_used
                added.add(node)
            node = node.parent
        if not checkpoints:
            continue
        tokens = cache.path_tokens(leaf)[: checkpoints[0].length]
        walk = merged.walk(tokens)
        own = cache.path_kv_slots(leaf)[walk.length : len(tokens)] + np.int32(kv_offset)
        kv_slots = np.concatenate([walk.kv_slots(walk.length), own])
        merged.insert(tokens, kv_slots, checkpoints, protected_length=walk.length)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int32)

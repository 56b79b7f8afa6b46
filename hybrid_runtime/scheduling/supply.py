"""Where slots come from: the free list, and behind it what the prefix cache can give up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.cache.ghosts import GhostIndex
from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import FreedSlots
from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.allocator import SlotAllocator


class SlotSupply:
    """Takes slots from the two allocators, evicting from the cache when a free list runs short."""

    def __init__(self, kv: SlotAllocator, states: SlotAllocator, cache: RadixCache) -> None:
        self.kv = kv
        self.states = states
        self.cache = cache
        self.cache.on_evict = self._note_eviction
        self.on_evict: Callable[[Node], None] | None = None  # as a cache's: a second tier that keeps what goes
        self.ghosts = GhostIndex()
        self.num_evicted_tokens = 0
        self.num_evicted_states = 0

    def start_over(self) -> None:
        """Declares all slots free and the cache empty, whoever owned them."""
        self.kv = SlotAllocator(self.kv.num_slots)
        self.states = SlotAllocator(self.states.num_slots)
        self.cache = self.cache.emptied()
        self.ghosts.clear()

    def reset_cache(self) -> None:
        """Empties the cache. Raises ValueError, and changes nothing, while any lock is held."""
        self.release(self.cache.reset())
        self.ghosts.clear()

    def can_supply(self, num_kv: int, num_states: int) -> bool:
        """Whether that many slots are free or evictable, in both pools at once. Evicts nothing; O(1)."""
        return (
            num_kv <= self.kv.num_free + self.cache.num_evictable_kv
            and num_states <= self.states.num_free + self.cache.num_evictable_states
        )

    def take_kv(self, count: int) -> NDArray[np.int32]:
        """`count` KV slots for the caller to own. Raises PoolExhausted, evicting nothing, if they can't be had."""
        if count > self.kv.num_free:
            self._require(count, 0)
            self._count_evicted(self.cache.evict_kv(count - self.kv.num_free))
        return self.kv.allocate(count)

    def take_states(self, count: int) -> NDArray[np.int32]:
        """`count` state slots for the caller to own. Raises PoolExhausted, evicting nothing, if they can't be had."""
        if count > self.states.num_free:
            self._require(0, count)
            self._count_evicted(self.cache.evict_state(count - self.states.num_free))
        return self.states.allocate(count)

    def release(self, freed: FreedSlots) -> None:
        """Puts slots that nobody owns any more on the free lists."""
        self.kv.release(freed.kv_slots)
        self.states.release(freed.state_slots)

    def release_kv(self, slots: NDArray[np.int32]) -> None:
        self.kv.release(slots)

    def release_states(self, slots: Iterable[int]) -> None:
        self.states.release(slots)

    def _require(self, num_kv: int, num_states: int) -> None:
        if not self.can_supply(num_kv, num_states):
            raise PoolExhausted(
                f"{num_kv} KV slots and {num_states} state slots are wanted; free: {self.kv.num_free} and "
                f"{self.states.num_free}, evictable: {self.cache.num_evictable_kv} and "
                f"{self.cache.num_evictable_states}"
            )

    def _note_eviction(self, node: Node) -> None:
        self.ghosts.remember(node)
        if self.on_evict is not None:
            self.on_evict(node)

    def _count_evicted(self, freed: FreedSlots) -> None:
        self.num_evicted_tokens += len(freed.kv_slots)
        self.num_evicted_states += len(freed.state_slots)
        self.release(freed)

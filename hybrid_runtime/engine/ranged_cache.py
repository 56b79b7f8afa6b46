"""The prefix cache with ranges around its operations; the cache itself knows of no profiler."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_runtime.cache.node import TokenArray
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint, FreedSlots, InsertResult, PrefixMatch
from hybrid_runtime.engine.ranges import Range
from hybrid_runtime.memory.slots import SlotArray


class RangedCache(RadixCache):
    """A `RadixCache` whose matches, insertions and evictions show in a profile."""

    def match(self, tokens: TokenArray) -> PrefixMatch:
        with Range("cache.match"):
            return super().match(tokens)

    def insert(
        self, tokens: TokenArray, kv_slots: SlotArray, checkpoints: Sequence[Checkpoint], *, protected_length: int = 0
    ) -> InsertResult:
        with Range("cache.insert"):
            return super().insert(tokens, kv_slots, checkpoints, protected_length=protected_length)

    def evict_kv(self, n: int) -> FreedSlots:
        with Range("cache.evict"):
            return super().evict_kv(n)

    def evict_state(self, n: int) -> FreedSlots:
        with Range("cache.evict"):
            return super().evict_state(n)

    def emptied(self) -> RangedCache:
        return RangedCache(self._policy, on_evict=self.on_evict)

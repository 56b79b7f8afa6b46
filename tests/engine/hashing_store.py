"""The second tier of a hashing runner: contents of slots as strings, which can be looked at at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.scheduling.host_tier import HostTier, SlotCopy
from hybrid_runtime.scheduling.supply import SlotSupply
from tests.engine.hashing_runner import POISON, HashingRunner


class DeviceContents(Protocol):
    """What each slot of two pools holds."""

    kv: list[str]
    states: list[str]


class HashingStore:
    """A `HostStore` beside a `HashingRunner`, or whatever else has the contents of both pools.

    `before_copy` is called with "save" or "restore" in the middle of each copy: what it raises leaves that copy half
    done.
    """

    def __init__(self, device: DeviceContents, num_kv: int, num_states: int) -> None:
        self.device = device
        self.kv = [POISON] * (num_kv + 1)
        self.states = [POISON] * (num_states + 1)
        self.before_copy: Callable[[str], None] = lambda direction: None
        self.is_closed = False

    def save(self, copy: SlotCopy) -> None:
        self._copy("save", copy, self.device, self)

    def restore(self, copy: SlotCopy) -> None:
        self._copy("restore", copy, self, self.device)

    def close(self) -> None:
        self.is_closed = True

    def _copy(
        self,
        direction: str,
        copy: SlotCopy,
        sources: DeviceContents,
        destinations: DeviceContents,
    ) -> None:
        for source, destination in zip(copy.kv_sources.tolist(), copy.kv_destinations.tolist(), strict=True):
            assert sources.kv[source] != POISON
            destinations.kv[destination] = POISON
        destinations.states[copy.state_destination] = POISON
        self.before_copy(direction)
        for source, destination in zip(copy.kv_sources.tolist(), copy.kv_destinations.tolist(), strict=True):
            destinations.kv[destination] = sources.kv[source]
        destinations.states[copy.state_destination] = sources.states[copy.state_source]


def attach_hashing_tier(
    runner: HashingRunner, *, num_kv: int, num_states: int, min_saving: int = 1
) -> tuple[HostTier, HashingStore]:
    """Puts a second tier behind the pools of a hashing runner."""
    store = HashingStore(runner, num_kv, num_states)
    host = SlotSupply(SlotAllocator(num_kv), SlotAllocator(num_states), RadixCache("lru"))
    tier = HostTier(runner.memory.supply, host, store, min_saving=min_saving)
    runner.memory.attach_tier(tier)
    return tier, store


def poison_free_slots(tier: HostTier, store: HashingStore) -> None:
    """Overwrites every host slot that nobody owns."""
    for slot in tier.host.kv.free_slots():
        store.kv[slot] = POISON
    for slot in tier.host.states.free_slots():
        store.states[slot] = POISON


def check_contents(cache: RadixCache, kv: list[str], states: list[str]) -> None:
    """Every node's KV and state are those of the tokens from the root to its end."""
    for node in cache.nodes():
        tokens = cache.path_tokens(node).tolist()
        prefixes = [".".join(map(str, tokens[:length])) for length in range(1, len(tokens) + 1)]
        assert [kv[slot] for slot in cache.path_kv_slots(node)] == prefixes
        if node.state_slot is not None:
            assert states[node.state_slot] == prefixes[-1]

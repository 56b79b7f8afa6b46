"""A second tier of the prefix cache: what the device's pools evict goes to host slots, and comes back on a match.

The host's content is a radix cache of its own over slots of its own, so that all invariants of the one are those of the
other. A checkpoint is there with the KV of its whole path, whatever of that the device still has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybrid_runtime.cache.node import Node, TokenArray
from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.cache.tree import Walk
from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.slots import SlotArray, StateSlot, no_slots
from hybrid_runtime.scheduling.paths import checkpoint_at_end, deepest_whole_node
from hybrid_runtime.scheduling.supply import SlotSupply

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SlotCopy:
    """Contents that go from one tier to the other: KV slot `kv_sources[i]` to `kv_destinations[i]`, and one state."""

    kv_sources: SlotArray
    kv_destinations: SlotArray
    state_source: StateSlot
    state_destination: StateSlot


class HostStore(Protocol):
    """Holds the contents of the host's slots. Both methods raise OSError where they fail; the slots that they would
    have written hold nothing then.
    """

    def save(self, copy: SlotCopy) -> None:
        """Copies from slots of the device to slots of the host."""

    def restore(self, copy: SlotCopy) -> None:
        """Copies from slots of the host to slots of the device."""

    def close(self) -> None:
        """Gives the memory back. May be called any number of times."""


@dataclass
class HostTierCounts:
    """What went to the host and came back since the start."""

    num_saved_checkpoints: int = 0
    num_saved_tokens: int = 0  # whose KV was copied; what the host had of a path is not copied again
    num_skipped_checkpoints: int = 0  # evicted, but too large for the host
    num_restored_checkpoints: int = 0
    num_restored_tokens: int = 0  # whose KV was copied back
    num_failures: int = 0  # copies that the operating system refused


class HostTier:
    """Saves what `device` evicts into `host`, and brings it back when a request could resume from it.

    Both tiers may hold the same checkpoint: what came back and is evicted again costs no second copy.
    """

    def __init__(
        self,
        device: SlotSupply,
        host: SlotSupply,
        store: HostStore,
        *,
        min_saving: int = 1,
        kv_slot_bytes: int = 0,
        state_slot_bytes: int = 0,
    ) -> None:
        """Subscribes to the evictions of `device`. `min_saving`: tokens that bringing a checkpoint back must save."""
        self.host = host
        self.kv_slot_bytes = kv_slot_bytes
        self.state_slot_bytes = state_slot_bytes
        self.counts = HostTierCounts()
        self._device = device
        self.store = store
        self._min_saving = max(1, min_saving)
        # Called before the host writes to slots of the device: a step in flight may still read what they held.
        self.before_restore: Callable[[], None] = lambda: None
        device.on_evict = self.save

    @property
    def total_bytes(self) -> int:
        """Of all slots; the null slots are not counted."""
        return self.host.kv.num_slots * self.kv_slot_bytes + self.host.states.num_slots * self.state_slot_bytes

    @property
    def used_bytes(self) -> int:
        cache = self.host.cache
        return cache.num_kv_slots * self.kv_slot_bytes + cache.num_state_slots * self.state_slot_bytes

    def save(self, node: Node) -> None:
        """Keeps the checkpoint at a node that `device` is about to evict, at the cost of the host's own least valuable.

        Leaves the device's tree and slots as they are. A checkpoint too short ever to be brought back is not kept.
        """
        if node.length < self._min_saving:
            return
        tokens = self._device.cache.path_tokens(node)
        held = checkpoint_at_end(self.host.cache, tokens)
        if held is not None:
            with _locked(self.host, held):
                pass  # a use: the device had it for as long as it was of use there
            return
        moved = self._move(self._device, node, self.host, self.store.save, hold=nullcontext())
        if isinstance(moved, OSError):
            self._note_failure("saving", moved)
        elif moved is None:
            self.counts.num_skipped_checkpoints += 1
        else:
            self.counts.num_saved_checkpoints += 1
            self.counts.num_saved_tokens += moved

    def restore(self, tokens: TokenArray, *, num_kv: int) -> None:
        """Brings back what a request would match with `tokens`, if the device has nothing nearly as deep.

        `num_kv`: KV slots that the request needs in all, those that it will share included. Nothing is evicted and
        nothing comes back unless the device can give all these and a working slot afterwards. A store that cannot be
        read any more is emptied.
        """
        match = self.host.cache.match(tokens)
        if match.state_length < self._device.cache.match(tokens).state_length + self._min_saving:
            return
        self.before_restore()
        moved = self._move(
            self.host,
            match.node,
            self._device,
            self.store.restore,
            hold=_locked(self.host, match.node),
            spare_kv=num_kv - match.state_length,
            spare_states=1,
        )
        if isinstance(moved, OSError):
            self._note_failure("bringing back", moved)
            self.host.reset_cache()
        elif moved is not None:
            self.counts.num_restored_checkpoints += 1
            self.counts.num_restored_tokens += moved

    def reachable_length(self, tokens: TokenArray) -> int:
        """Tokens that a request with `tokens` could skip, if there is room for them. Read-only."""
        device_length = self._device.cache.match(tokens).state_length
        host_length = self.host.cache.match(tokens).state_length
        return host_length if host_length >= device_length + self._min_saving else device_length

    def close(self) -> None:
        """Gives the store's memory back; nothing can be saved or restored afterwards."""
        self.store.close()

    def start_over(self) -> None:
        """Declares the host empty, whoever owned what."""
        self.host.start_over()

    def reset(self) -> None:
        """Empties the host."""
        self.host.reset_cache()

    def check(self) -> None:
        """Asserts that the host's tree is sound and unlocked, and each slot either free or in it.

        Valid between operations. O(slots + tokens in the tree); raises AssertionError.
        """
        cache = self.host.cache
        cache.check()
        assert cache.num_protected_kv == cache.num_protected_states == 0, "a lock of the host's tree was left"
        for name, allocator, owned in (
            ("KV", self.host.kv, cache.owned_kv_slots()),
            ("state", self.host.states, cache.owned_state_slots()),
        ):
            slots = np.sort(np.concatenate([allocator.free_slots(), owned]))
            assert np.array_equal(slots, np.arange(1, allocator.num_slots + 1)), (
                f"{name} slots of the host are not each owned once: {allocator.num_free} free + {len(owned)} in the "
                f"tree, {allocator.num_slots} in all"
            )

    def _move(
        self,
        source: SlotSupply,
        node: Node,
        destination: SlotSupply,
        copy: Callable[[SlotCopy], None],
        *,
        hold: AbstractContextManager[None],
        spare_kv: int = 0,
        spare_states: int = 0,
    ) -> int | OSError | None:
        """Copies the checkpoint at `node` into the other tier's tree, which must not have a state there.

        Returns the number of tokens whose KV had to be copied; the error of a copy that failed, with nothing changed
        but what was evicted for it; None, with nothing changed, if `destination` cannot give the slots and `spare_kv`
        and `spare_states` more. `hold` keeps the source while the destination evicts, since what a device evicts goes
        to the host. Locks are not undone when any other exception passes: the engine starts over then.
        """
        tokens = source.cache.path_tokens(node)
        receipt = destination.cache.lock_kv(deepest_whole_node(destination.cache, tokens))
        num_missing = len(tokens) - receipt.node.length
        moved: int | OSError | None = None
        if destination.can_supply(num_missing + spare_kv, 1 + spare_states):
            with hold:
                try:
                    moved = self._copy(source, node, tokens, destination, copy)
                except OSError as error:
                    moved = error
                except PoolExhausted:
                    moved = None
        destination.release(destination.cache.unlock(receipt))
        return moved

    def _copy(
        self,
        source: SlotSupply,
        node: Node,
        tokens: TokenArray,
        destination: SlotSupply,
        copy: Callable[[SlotCopy], None],
    ) -> int:
        """Returns the number of tokens whose KV had to be copied. Gives its slots back where anything raises."""
        assert node.state_slot is not None
        assert node.origin is not None
        with ExitStack() as undo:
            state_slots = destination.take_states(1)
            undo.callback(destination.release_states, state_slots)
            walk, kv_slots = _take_missing(destination, tokens)
            undo.callback(destination.release_kv, kv_slots)
            state_slot = StateSlot(int(state_slots[0]))
            # Looked up only now: what the destination has just evicted may have split the source's path.
            kv_sources = source.cache.path_kv_slots(node)[walk.length :]
            copy(SlotCopy(kv_sources, kv_slots, node.state_slot, state_slot))
            undo.pop_all()
        result = destination.cache.insert(
            tokens,
            np.concatenate([walk.kv_slots(walk.length), kv_slots]),
            [Checkpoint(len(tokens), state_slot, node.origin)],
            protected_length=walk.length,
        )
        assert result.num_attached == 1, "the state that was copied was there already"
        return len(kv_slots)

    def _note_failure(self, action: str, error: OSError) -> None:
        self.counts.num_failures += 1
        if self.counts.num_failures == 1:
            _LOGGER.error("%s a cached prefix failed; requests go on without it", action, exc_info=error)


def _take_missing(supply: SlotSupply, tokens: TokenArray) -> tuple[Walk, SlotArray]:
    """What the tree has of `tokens`, and KV slots for the others, in ascending order.

    Taking slots may evict from the very end of the path that is to be kept, hence more than one round. Raises
    PoolExhausted, and keeps none, if they are not all available.
    """
    kv_slots = no_slots()
    while (walk := supply.cache.walk(tokens)).length + len(kv_slots) < len(tokens):
        try:
            taken = supply.take_kv(len(tokens) - walk.length - len(kv_slots))
        except PoolExhausted:
            supply.release_kv(kv_slots)
            raise
        kv_slots = np.concatenate([kv_slots, taken])
    return walk, np.sort(kv_slots)  # long runs of neighbours are copied as one


@contextmanager
def _locked(supply: SlotSupply, node: Node) -> Iterator[None]:
    """Keeps a checkpoint and its path from eviction; counts as a use of it."""
    receipt = supply.cache.lock(node)
    yield
    supply.release(supply.cache.unlock(receipt))

"""What goes into the prefix cache and what its operations answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid_runtime.cache.node import Node
from hybrid_runtime.memory.slots import SlotArray, StateSlot, no_slots


@dataclass(frozen=True)
class Checkpoint:
    """A state slot and the number of tokens after which its state is exact. `origin` says why it was kept."""

    length: int
    state_slot: StateSlot
    origin: str


@dataclass(frozen=True, eq=False)
class FreedSlots:
    """Slots the tree no longer owns; the caller does, and releases them to the two allocators."""

    kv_slots: SlotArray
    state_slots: SlotArray

    def __add__(self, other: FreedSlots) -> FreedSlots:
        return FreedSlots(
            kv_slots=np.concatenate([self.kv_slots, other.kv_slots]),
            state_slots=np.concatenate([self.state_slots, other.state_slots]),
        )


class SlotCollector:
    """Gathers what one operation frees, so that arrays are joined once."""

    def __init__(self) -> None:
        self.num_kv = 0
        self._kv_parts: list[SlotArray] = []
        self._state_slots: list[StateSlot] = []

    @property
    def num_states(self) -> int:
        return len(self._state_slots)

    def add_kv(self, kv_slots: SlotArray) -> None:
        self.num_kv += len(kv_slots)
        self._kv_parts.append(kv_slots)

    def add_state(self, state_slot: StateSlot) -> None:
        self._state_slots.append(state_slot)

    def freed(self) -> FreedSlots:
        return FreedSlots(join_slots(self._kv_parts), np.array(self._state_slots, dtype=np.int32))


@dataclass(frozen=True, eq=False)
class PrefixMatch:
    """How much of a prompt is cached. Valid until the next operation that may evict or prune, unless `node` is locked.

    `state_length` tokens can be skipped: `kv_slots` (int32 `[state_length]`) and `state_slot` hold them. The tree's
    keys agree with the prompt for `kv_length >= state_length` tokens. Without a state on the path `state_length` is 0,
    `node` the root, `state_slot` and `origin` None.
    """

    state_length: int
    kv_length: int
    node: Node
    state_slot: StateSlot | None
    kv_slots: SlotArray
    origin: str | None


@dataclass(frozen=True, eq=False)
class InsertResult:
    """What became of an insert's slots.

    `tokens[:kv_length]` are in the tree, in the tree's `kv_slots` (int32 `[kv_length]`); `node` ends there (the root if
    there was no checkpoint). The duplicates are the caller's again, as are all its KV slots from `kv_length` on.
    """

    node: Node
    kv_length: int
    kv_slots: SlotArray
    duplicate_kv_slots: SlotArray
    duplicate_state_slots: SlotArray
    num_attached: int


def join_slots(parts: list[SlotArray]) -> SlotArray:
    """One new array of all parts, int32."""
    return np.concatenate(parts) if parts else no_slots()

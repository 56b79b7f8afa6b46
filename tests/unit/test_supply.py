"""Slots from the free lists and from what the cache can give up, with the real cache and allocators."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.cache.radix_cache import LockReceipt, RadixCache
from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.scheduling.supply import SlotSupply
from tests.cache.helpers import checkpoint, ints, kv_contents, state_contents

NUM_KV, NUM_STATES = 14, 5


@dataclass
class World:
    """A supply whose cache holds sequences; `held_kv` and `held_states` are owned by nobody in the tree."""

    supply: SlotSupply = field(
        default_factory=lambda: SlotSupply(SlotAllocator(NUM_KV), SlotAllocator(NUM_STATES), RadixCache())
    )
    receipts: list[LockReceipt] = field(default_factory=list)
    held_kv: list[int] = field(default_factory=list)
    held_states: list[int] = field(default_factory=list)

    def insert(self, tokens: list[int]) -> None:
        """Caches a sequence with a state at its end, if the free lists have the slots."""
        kv, states = self.supply.kv, self.supply.states
        if kv.num_free < len(tokens) or states.num_free < 1:
            return
        slots, state = kv.allocate(len(tokens)), int(states.allocate(1)[0])
        result = self.supply.cache.insert(ints(tokens), slots, [checkpoint(len(tokens), state)])
        self.supply.release_kv(result.duplicate_kv_slots)
        self.supply.release_states(result.duplicate_state_slots)

    def lock(self, tokens: list[int], *, with_state: bool) -> None:
        node = self.supply.cache.match(ints([*tokens, 0])).node
        self.receipts.append(self.supply.cache.lock(node) if with_state else self.supply.cache.lock_kv(node))

    def evict_state(self) -> None:
        """Leaves a tombstone where there was a state on the way to another."""
        self.supply.release(self.supply.cache.evict_state(1))

    def hold(self, num_kv: int, num_states: int) -> None:
        self.held_kv += self.supply.kv.allocate(min(num_kv, self.supply.kv.num_free)).tolist()
        self.held_states += self.supply.states.allocate(min(num_states, self.supply.states.num_free)).tolist()

    def snapshot(self) -> tuple[object, ...]:
        supply = self.supply
        free = (sorted(supply.kv.free_slots().tolist()), sorted(supply.states.free_slots().tolist()))
        evicted = (supply.num_evicted_tokens, supply.num_evicted_states)
        return (kv_contents(supply.cache), state_contents(supply.cache), free, evicted)

    def check(self) -> None:
        """Every slot of both pools has one owner."""
        self.supply.cache.check()
        cache = self.supply.cache
        kv = [*self.supply.kv.free_slots(), *cache.owned_kv_slots(), *self.held_kv]
        states = [*self.supply.states.free_slots(), *cache.owned_state_slots(), *self.held_states]
        assert sorted(kv) == list(range(1, NUM_KV + 1))
        assert sorted(states) == list(range(1, NUM_STATES + 1))


SEQUENCES = st.lists(st.integers(1, 2), min_size=1, max_size=6)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World()
    sequences = draw(st.lists(SEQUENCES, max_size=6))
    for tokens in sequences:
        world.insert(tokens)
        if draw(st.booleans()):
            world.lock(tokens, with_state=draw(st.booleans()))
        if draw(st.integers(0, 4)) == 0:
            world.evict_state()
    world.hold(draw(st.integers(0, NUM_KV)), draw(st.integers(0, NUM_STATES)))
    return world


@given(worlds(), st.integers(0, NUM_KV + 1), st.integers(0, NUM_STATES + 1), st.booleans())
def test_can_supply_exactly_when_both_can_be_taken(world, num_kv, num_states, kv_first):
    promised = world.supply.can_supply(num_kv, num_states)
    world.check()

    def take_kv() -> None:
        world.held_kv += world.supply.take_kv(num_kv).tolist()

    def take_states() -> None:
        world.held_states += world.supply.take_states(num_states).tolist()

    num_taken = 0
    for take in (take_kv, take_states) if kv_first else (take_states, take_kv):
        try:
            take()
            num_taken += 1
        except PoolExhausted:
            pass
        world.check()
    assert (num_taken == 2) == promised


@given(worlds(), st.integers(0, NUM_KV + 1), st.integers(0, NUM_STATES + 1))
def test_a_refusal_or_a_question_changes_nothing(world, num_kv, num_states):
    before = world.snapshot()
    world.supply.can_supply(num_kv, num_states)
    assert world.snapshot() == before
    for take, count, possible in (
        (world.supply.take_kv, num_kv, world.supply.can_supply(num_kv, 0)),
        (world.supply.take_states, num_states, world.supply.can_supply(0, num_states)),
    ):
        if not possible:
            with pytest.raises(PoolExhausted, match=str(count)):
                take(count)
            assert world.snapshot() == before


@given(worlds(), st.integers(0, NUM_KV), st.integers(0, NUM_STATES))
def test_nothing_is_evicted_while_the_free_list_suffices(world, num_kv, num_states):
    before = world.snapshot()[:2]
    world.supply.take_kv(min(num_kv, world.supply.kv.num_free))
    world.supply.take_states(min(num_states, world.supply.states.num_free))
    assert world.snapshot()[:2] == before
    assert (world.supply.num_evicted_tokens, world.supply.num_evicted_states) == (world.snapshot()[3])


@given(worlds(), st.integers(0, NUM_KV), st.integers(0, NUM_STATES))
def test_what_is_locked_stays(world, num_kv, num_states):
    cache = world.supply.cache
    locked_kv, locked_states = cache.num_protected_kv, cache.num_protected_states
    for take, count in ((world.supply.take_kv, num_kv), (world.supply.take_states, num_states)):
        try:
            take(count)
        except PoolExhausted:
            continue
    assert (cache.num_protected_kv, cache.num_protected_states) == (locked_kv, locked_states)
    for receipt in world.receipts:
        world.supply.release(cache.unlock(receipt))
    cache.check()
    assert (cache.num_protected_kv, cache.num_protected_states) == (0, 0)


def test_evictions_are_counted_in_both_pools():
    world = World()
    world.insert([1, 1, 1])
    world.insert([2, 2])
    world.held_kv += world.supply.take_kv(NUM_KV - 4).tolist()  # one token more than is free: a leaf goes whole
    assert (world.supply.num_evicted_tokens, world.supply.num_evicted_states) == (3, 1)
    world.held_states += world.supply.take_states(NUM_STATES).tolist()
    assert (world.supply.num_evicted_tokens, world.supply.num_evicted_states) == (5, 2)
    world.check()
    assert world.supply.cache.num_nodes == 0


def test_a_refusal_says_what_there_is():
    world = World()
    world.insert([1, 1, 1])
    with pytest.raises(PoolExhausted, match="15 KV slots and 0 state slots are wanted; free: 11 and 4, evictable: 3"):
        world.supply.take_kv(NUM_KV + 1)


def test_taken_slots_are_int32_and_can_be_released_in_any_form():
    supply = World().supply
    kv, states = supply.take_kv(3), supply.take_states(2)
    assert kv.dtype == states.dtype == np.int32
    supply.release_kv(kv)
    supply.release_states(int(slot) for slot in states)
    assert (supply.kv.num_free, supply.states.num_free) == (NUM_KV, NUM_STATES)
    assert len(supply.take_kv(0)) == len(supply.take_states(0)) == 0

"""The slot allocator: worked cases, and a state machine against a set of free slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.allocator import SlotAllocator


def test_hands_out_every_slot_but_the_null_slot_once():
    allocator = SlotAllocator(5)
    slots = allocator.allocate(5)
    assert slots.dtype == np.int32
    assert sorted(slots.tolist()) == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0


def test_an_empty_allocation_and_an_empty_release_are_fine():
    allocator = SlotAllocator(0)
    empty = allocator.allocate(0)
    assert empty.dtype == np.int32
    assert empty.shape == (0,)
    allocator.release(empty)
    allocator.release([])


def test_what_was_handed_out_does_not_change_with_later_calls():
    allocator = SlotAllocator(4)
    first = allocator.allocate(2)
    kept = first.copy()
    allocator.release(first)
    allocator.release(allocator.allocate(4)[::-1])
    np.testing.assert_array_equal(first, kept)


def test_exhaustion_names_the_numbers_and_takes_nothing():
    allocator = SlotAllocator(5)
    allocator.allocate(3)
    with pytest.raises(PoolExhausted, match=r"asked for 3 slots, 2 of 5 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2
    assert len(allocator.allocate(2)) == 2


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="-1"):
        SlotAllocator(-1)
    with pytest.raises(ValueError, match="-2"):
        SlotAllocator(3).allocate(-2)


@pytest.mark.parametrize(
    "released",
    [[0], [5], [-1], [1, 1], [4], [1, 4], [2**32 + 1]],
    ids=["null", "too-large", "negative", "repeated", "free", "one-free", "wraps-to-1-in-int32"],
)
def test_a_bad_release_changes_nothing(released):
    allocator = SlotAllocator(4)
    held = allocator.allocate(3).tolist()
    assert held == [1, 2, 3]
    with pytest.raises(ValueError, match="slots"):
        allocator.release(released)
    with pytest.raises(ValueError, match="slots"):
        allocator.release(np.array(released))
    assert allocator.num_free == 1
    allocator.release(held)
    assert sorted(allocator.free_slots().tolist()) == [1, 2, 3, 4]


def test_only_lists_of_integers_can_be_released():
    allocator = SlotAllocator(4)
    held = allocator.allocate(4)
    with pytest.raises(ValueError, match="float"):
        allocator.release(held.astype(np.float64))
    with pytest.raises(ValueError, match="shape"):
        allocator.release(held.reshape(2, 2))


def test_slots_of_any_integer_type_can_be_released():
    allocator = SlotAllocator(4)
    for dtype in (np.int8, np.uint16, np.int32, np.int64, np.uint64):
        allocator.release(allocator.allocate(4).astype(dtype))
        assert sorted(allocator.free_slots().tolist()) == [1, 2, 3, 4]
    allocator.allocate(4)
    for wraps_around in (2**63 + 1, 2**64 - 3):
        with pytest.raises(ValueError, match=str(wraps_around)):
            allocator.release(np.array([wraps_around], dtype=np.uint64))
    assert allocator.num_free == 0


def test_a_slot_repeated_far_apart_in_a_long_release_is_found_and_nothing_is_changed():
    allocator = SlotAllocator(5000)
    held = allocator.allocate(4000)
    free = allocator.free_slots().tolist()
    for repeated in (np.append(held, held[0]), np.concatenate([held[:2000], held[1999:]])):
        with pytest.raises(ValueError, match="in one call"):
            allocator.release(repeated)
        assert allocator.free_slots().tolist() == free
    allocator.release(held)
    assert sorted(allocator.free_slots().tolist()) == list(range(1, 5001))


@pytest.mark.parametrize("slot", [0, 3])
def test_only_slots_of_the_pool_are_free_or_not(slot):
    with pytest.raises(ValueError, match=str(slot)):
        SlotAllocator(2).is_free(slot)


class AllocatorMachine(RuleBasedStateMachine):
    """Against the set of free slots."""

    @initialize(num_slots=st.integers(0, 9))
    def start(self, num_slots):
        self.allocator = SlotAllocator(num_slots)
        self.all = set(range(1, num_slots + 1))
        self.free = set(self.all)

    @rule(n=st.integers(0, 10))
    def allocate(self, n):
        if n > len(self.free):
            with pytest.raises(PoolExhausted):
                self.allocator.allocate(n)
            return
        slots = self.allocator.allocate(n).tolist()
        assert len(set(slots)) == n
        assert set(slots) <= self.free
        self.free -= set(slots)

    @precondition(lambda self: self.free != self.all)
    @rule(data=st.data(), as_array=st.booleans())
    def release(self, data, as_array):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.all - self.free)), unique=True))
        self.allocator.release(np.array(slots, dtype=np.int32) if as_array else iter(slots))
        self.free |= set(slots)

    @rule(slots=st.lists(st.integers(-1, 11), min_size=1))
    def release_anything(self, slots):
        legal = len(set(slots)) == len(slots) and set(slots) <= self.all - self.free
        if legal:
            self.allocator.release(slots)
            self.free |= set(slots)
        else:
            with pytest.raises(ValueError, match="slots"):
                self.allocator.release(slots)

    @invariant()
    def agrees_with_the_set(self):
        free = self.allocator.free_slots().tolist()
        assert len(free) == len(self.free) == self.allocator.num_free
        assert set(free) == self.free
        assert {slot for slot in self.all if self.allocator.is_free(slot)} == self.free


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(deadline=None)

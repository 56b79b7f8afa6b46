"""The device's tree and the host's, with strings for contents: what is evicted, what comes back, and who owns what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.receipt import LockReceipt
from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.slots import SlotArray, StateSlot
from hybrid_runtime.scheduling.host_tier import HostTier
from hybrid_runtime.scheduling.supply import SlotSupply
from tests.cache.helpers import ints, state_contents
from tests.engine.hashing_runner import POISON, content
from tests.engine.hashing_store import HashingStore, check_contents


@dataclass(frozen=True, eq=False)
class Resident:
    """What a request that runs owns, as in the engine: a working slot, and KV slots behind the tree's."""

    tokens: np.ndarray
    kv_slots: SlotArray
    protected_length: int
    working_slot: StateSlot
    receipt: LockReceipt


class TwoTiers:
    """Pools of strings, the tree over them, and a second tier; requests move in and out as in the engine."""

    def __init__(self, num_kv: int, num_states: int, host_kv: int, host_states: int, min_saving: int = 1) -> None:
        self.device = _supply(num_kv, num_states)
        self.kv = [POISON] * (num_kv + 1)
        self.states = [POISON] * (num_states + 1)
        self.store = HashingStore(self, host_kv, host_states)
        self.tier = HostTier(self.device, _supply(host_kv, host_states), self.store, min_saving=min_saving)
        self.residents: list[Resident] = []

    def admit(self, tokens: np.ndarray) -> int | None:
        """Brings back, matches, and moves in; the number of tokens that were skipped, None where there is no room."""
        could_before = self._could_admit(tokens)
        reachable = self.tier.reachable_length(tokens)
        self.tier.restore(tokens, num_kv=len(tokens))
        match = self.device.cache.match(tokens)
        assert match.state_length <= reachable
        receipt = self.device.cache.lock(match.node)
        if not self.device.can_supply(len(tokens) - match.state_length, 1):
            self.device.release(self.device.cache.unlock(receipt))
            assert not could_before, "what came back took the request's own place"
            return None
        working_slot = StateSlot(int(self.device.take_states(1)[0]))
        own = self.device.take_kv(len(tokens) - match.state_length)
        kv_slots = np.concatenate([match.kv_slots, own])
        for position in range(match.state_length, len(tokens)):
            self.kv[kv_slots[position]] = content(tokens[: position + 1])
        self.states[working_slot] = content(tokens)
        receipt.release_state()
        self.residents.append(Resident(tokens, kv_slots, match.state_length, working_slot, receipt))
        return match.state_length

    def finish(self, resident: Resident, *, keep: bool) -> None:
        """Moves a request out; its working slot becomes a checkpoint if it is to be kept."""
        self.residents.remove(resident)
        first_own = resident.protected_length
        if keep:
            result = self.device.cache.insert(
                resident.tokens,
                resident.kv_slots,
                [Checkpoint(len(resident.tokens), resident.working_slot, "final")],
                protected_length=resident.protected_length,
            )
            self.device.release_kv(result.duplicate_kv_slots)
            self.device.release_states(result.duplicate_state_slots)
        else:
            self.device.release_states([resident.working_slot])
            self.device.release_kv(resident.kv_slots[first_own:])
        self.device.release(self.device.cache.unlock(resident.receipt))

    def visit(self, tokens: list[int]) -> int | None:
        """One request from beginning to end."""
        num_skipped = self.admit(ints(tokens))
        if num_skipped is not None:
            self.finish(self.residents[-1], keep=True)
        return num_skipped

    def poison_free_slots(self) -> None:
        for slots, contents in (
            (self.device.kv.free_slots(), self.kv),
            (self.device.states.free_slots(), self.states),
            (self.tier.host.kv.free_slots(), self.store.kv),
            (self.tier.host.states.free_slots(), self.store.states),
        ):
            for slot in slots:
                contents[slot] = POISON

    def check(self) -> None:
        self.device.cache.check()
        self.tier.check()
        check_contents(self.device.cache, self.kv, self.states)
        check_contents(self.tier.host.cache, self.store.kv, self.store.states)
        cache = self.device.cache
        kv = [self.device.kv.free_slots(), cache.owned_kv_slots()]
        states = [self.device.states.free_slots(), cache.owned_state_slots()]
        for resident in self.residents:
            kv.append(resident.kv_slots[resident.protected_length :])
            states.append(np.array([resident.working_slot]))
            prefixes = [content(resident.tokens[: end + 1]) for end in range(len(resident.tokens))]
            assert [self.kv[slot] for slot in resident.kv_slots] == prefixes
        assert sorted(np.concatenate(kv)) == list(range(1, self.device.kv.num_slots + 1))
        assert sorted(np.concatenate(states)) == list(range(1, self.device.states.num_slots + 1))

    def _could_admit(self, tokens: np.ndarray) -> bool:
        match = self.device.cache.match(tokens)
        receipt = self.device.cache.lock(match.node)
        could = self.device.can_supply(len(tokens) - match.state_length, 1)
        self.device.release(self.device.cache.unlock(receipt))
        return could


def _supply(num_kv: int, num_states: int) -> SlotSupply:
    return SlotSupply(SlotAllocator(num_kv), SlotAllocator(num_states), RadixCache("lru"))


class TwoTiersMachine(RuleBasedStateMachine):
    @initialize(
        num_kv=st.integers(6, 16),
        num_states=st.integers(1, 4),
        host_kv=st.integers(1, 30),
        host_states=st.integers(1, 6),
        min_saving=st.integers(1, 3),
    )
    def build(self, **sizes: int) -> None:
        self.tiers = TwoTiers(**sizes)
        self.known: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8))
    def visit(self, tokens: list[int]) -> None:
        self.known.append(tokens)
        self.tiers.visit(tokens)

    @precondition(lambda self: self.known)
    @rule(choice=st.integers(0, 100), extra=st.lists(st.integers(0, 1), min_size=1, max_size=4), stays=st.booleans())
    def continue_one(self, choice: int, extra: list[int], stays: bool) -> None:
        """A request that starts as an earlier one; it may go on running."""
        tokens = [*self.known[choice % len(self.known)], *extra][:12]
        if self.tiers.admit(ints(tokens)) is not None and not stays:
            self.tiers.finish(self.tiers.residents[-1], keep=True)
            self.known.append(tokens)

    @precondition(lambda self: self.tiers.residents)
    @rule(choice=st.integers(0, 100), keep=st.booleans())
    def finish(self, choice: int, keep: bool) -> None:
        self.tiers.finish(self.tiers.residents[choice % len(self.tiers.residents)], keep=keep)

    @rule(num_kv=st.integers(0, 6), num_states=st.integers(0, 2))
    def evict(self, num_kv: int, num_states: int) -> None:
        device = self.tiers.device
        if device.can_supply(0, num_states):
            device.release_states(device.take_states(num_states))
        if device.can_supply(num_kv, 0):
            device.release_kv(device.take_kv(num_kv))

    @rule(direction=st.sampled_from(["save", "restore", "both", "none"]))
    def choose_what_fails(self, direction: str) -> None:
        def fail(actual: str) -> None:
            if direction in (actual, "both"):
                raise OSError("planted")

        self.tiers.store.before_copy = fail

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.check()
            self.tiers.poison_free_slots()


TestTwoTiersMachine = TwoTiersMachine.TestCase
TestTwoTiersMachine.settings = settings(max_examples=max(200, settings().max_examples))


def _long(first: int, length: int = 5) -> list[int]:
    return [first, *range(100, 99 + length)]


def test_what_is_evicted_comes_back() -> None:
    tiers = TwoTiers(num_kv=12, num_states=2, host_kv=100, host_states=20)
    for first in range(8):
        tiers.visit(_long(first))
    for first in range(8):
        assert tiers.visit([*_long(first), 7]) == 5
        tiers.check()
    counts = tiers.tier.counts
    assert counts.num_restored_checkpoints == 8
    assert counts.num_restored_tokens == 40
    assert counts.num_skipped_checkpoints == counts.num_failures == 0
    origins = {origin for _, origin in state_contents(tiers.tier.host.cache).values()}
    assert origins == {"final"}


def test_the_host_keeps_what_was_of_use_last() -> None:
    tiers = TwoTiers(num_kv=6, num_states=2, host_kv=10, host_states=2)
    for first in range(4):
        tiers.visit(_long(first))
    assert tiers.visit([*_long(1), 7]) == 5  # 0 was pushed out by 2, and 3 is on the device
    assert tiers.visit([*_long(0), 7]) == 0
    tiers.check()


def test_use_on_the_device_counts_for_the_host() -> None:
    """What was of use on the device until it was evicted outlives what has come to the host in the meantime."""
    tiers = TwoTiers(num_kv=20, num_states=4, host_kv=100, host_states=2)

    def evict_states(num_free: int) -> None:
        tiers.device.release_states(tiers.device.take_states(num_free))

    def use(first: int) -> None:
        assert tiers.admit(ints([*_long(first), 7])) == 5
        tiers.finish(tiers.residents[-1], keep=False)

    tiers.visit(_long(1))
    evict_states(4)
    use(1)
    tiers.visit(_long(2))
    use(1)
    for num_free in (3, 4):  # first goes 2, then 1, of which the host has a copy
        evict_states(num_free)
    tiers.visit(_long(3))
    evict_states(4)
    assert sorted(prefix[0] for prefix in state_contents(tiers.tier.host.cache)) == [1, 3]


def test_kv_that_the_host_has_is_not_copied_again() -> None:
    tiers = TwoTiers(num_kv=8, num_states=3, host_kv=100, host_states=10)
    tiers.visit([1, 2, 3, 4])
    tiers.visit([1, 2, 3, 4, 5, 6])
    tiers.device.release_states(tiers.device.take_states(3))
    assert tiers.tier.counts.num_saved_checkpoints == 2
    assert tiers.tier.counts.num_saved_tokens == 6
    assert tiers.visit([1, 2, 3, 4, 5, 6, 7]) == 6
    tiers.device.release_states(tiers.device.take_states(3))
    assert tiers.tier.counts.num_saved_checkpoints == 3  # that of length 7; the other was there
    assert tiers.tier.counts.num_saved_tokens == 7


def test_a_path_is_not_evicted_for_its_own_continuation() -> None:
    tiers = TwoTiers(num_kv=20, num_states=4, host_kv=10, host_states=3, min_saving=4)
    for tokens in ([1, 2, 3, 4], [9, 8, 7, 6, 5], [1, 2, 3, 4, 5, 6]):
        tiers.visit(tokens)
        tiers.device.release_states(tiers.device.take_states(4))
    assert tiers.tier.counts.num_saved_tokens == 4 + 5 + 2
    assert [len(prefix) for prefix in state_contents(tiers.tier.host.cache)] == [4, 6]


def test_nothing_comes_back_for_less_than_min_saving() -> None:
    tiers = TwoTiers(num_kv=12, num_states=2, host_kv=100, host_states=20, min_saving=5)
    for first, length in ((1, 4), (2, 5), (3, 6), (4, 6)):
        tiers.visit(_long(first, length))
    assert tiers.visit([*_long(1, 4), 7]) == 0
    assert tiers.visit([*_long(2, 5), 7]) == 5


def test_what_could_never_come_back_is_not_kept() -> None:
    """It would only drive out what could."""
    tiers = TwoTiers(num_kv=12, num_states=2, host_kv=100, host_states=2, min_saving=5)
    tiers.visit(_long(1, 5))
    for first in range(2, 8):
        tiers.visit(_long(first, 4))
    assert tiers.tier.counts.num_saved_checkpoints == 1
    assert tiers.visit([*_long(1, 5), 7]) == 5


def test_nothing_comes_back_that_leaves_no_working_slot() -> None:
    tiers = TwoTiers(num_kv=12, num_states=1, host_kv=100, host_states=20)
    for first in (1, 2):
        tiers.visit(_long(first))
    assert tiers.visit([*_long(1), 7]) == 0
    tiers.check()


def test_a_running_request_is_not_starved_by_what_comes_back() -> None:
    """Half the KV is locked: the request must wait, though what it would match could come back, and nothing moves."""
    tiers = TwoTiers(num_kv=12, num_states=3, host_kv=100, host_states=20)
    for first in (1, 2, 3):
        tiers.visit(_long(first))
    assert tiers.admit(ints(_long(4, 6))) == 0
    before = state_contents(tiers.device.cache)
    assert tiers.admit(ints([*_long(1), 7, 7, 7])) is None
    assert state_contents(tiers.device.cache) == before
    assert tiers.tier.counts.num_restored_checkpoints == 0


def test_a_store_that_cannot_be_written_costs_only_the_hit(caplog: pytest.LogCaptureFixture) -> None:
    tiers = TwoTiers(num_kv=12, num_states=2, host_kv=100, host_states=20)

    def fail(direction: str) -> None:
        raise OSError("planted")

    tiers.store.before_copy = fail
    for first in range(8):
        assert tiers.visit(_long(first)) == 0
        tiers.check()
    assert tiers.tier.counts.num_failures == 6
    assert len([record for record in caplog.records if "planted" in str(record.exc_info)]) == 1
    assert tiers.tier.host.cache.num_nodes == 0


def test_a_store_that_cannot_be_read_is_emptied() -> None:
    tiers = TwoTiers(num_kv=12, num_states=2, host_kv=100, host_states=20)

    def fail(direction: str) -> None:
        if direction == "restore":
            raise OSError("planted")

    for first in range(4):
        tiers.visit(_long(first))
    tiers.store.before_copy = fail
    assert tiers.visit([*_long(0), 7]) == 0
    tiers.check()
    assert tiers.tier.counts.num_failures == 1
    tiers.store.before_copy = lambda direction: None
    assert tiers.visit([*_long(1), 7]) == 0  # went with the rest
    assert tiers.visit([*_long(0), 7, 7]) == 6

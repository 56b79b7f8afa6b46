"""A state machine drives the cache and two small pools as an engine would, against `NaiveCache`, under every policy.

After every rule the tree's invariants hold, every slot of both pools has exactly one owner (free list, tree or
request), and tree and model hold the same slots at the same prefixes under the same locks. Each victim of an eviction
is one that the model would let go and, by the policy's own rule, the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_runtime.cache.cost import CostKVOrder, CostStateOrder
from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.receipt import LockReceipt
from hybrid_runtime.cache.results import FreedSlots
from hybrid_runtime.cache.tree import RadixTree
from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.scheduling.supply import SlotSupply
from tests.cache.helpers import Prefix, checkpoint, freed_sets, ints, kv_contents, prefix_of, state_contents
from tests.cache.naive_cache import Freed, NaiveCache, NaiveLock

MAX_LENGTH = 7
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LENGTH).map(tuple)
picks = st.integers(0, 99)
some_lengths = st.lists(st.integers(1, MAX_LENGTH), max_size=3)


@dataclass
class Lock:
    receipt: LockReceipt
    naive: NaiveLock


@dataclass
class Request:
    """`row[:protected_length]` are the tree's slots, the rest its own; they cover `tokens[:len(row)]`."""

    tokens: Prefix
    row: list[int] = field(default_factory=list)
    protected_length: int = 0
    lock: Lock | None = None


class RadixMachine(RuleBasedStateMachine):
    policy: str

    @initialize(num_kv_slots=st.sampled_from([30, 20, 12, 7]), num_state_slots=st.sampled_from([9, 6, 4, 2]))
    def start(self, num_kv_slots, num_state_slots):
        self.cache = RadixCache(self.policy)
        self.naive = NaiveCache()
        self.kv = SlotAllocator(num_kv_slots)
        self.states = SlotAllocator(num_state_slots)
        self.supply = SlotSupply(self.kv, self.states, self.cache)
        self.cache.on_evict = self.witness
        self.victims: deque[Prefix] = deque()
        self.requests: list[Request] = []
        self.locks: list[Lock] = []

    def witness(self, node: Node) -> None:
        """A state is about to go: all of it is there still."""
        prefix = prefix_of(node)
        assert prefix not in self.victims
        assert (node.state_slot, node.origin) == self.naive.states[prefix]
        self.compare_path(node)
        self.victims.append(prefix)

    def next_kv_victim(self, leaves: Sequence[Prefix]) -> Prefix:
        """Of the model's own leaves, the one that the cache chose."""
        victim = self.victims.popleft()
        assert victim in leaves
        return victim

    def next_state_victim(self, prefixes: Sequence[Prefix]) -> Prefix:
        """Of the model's own unlocked states, the one that the cache chose."""
        victim = self.victims.popleft()
        assert victim in prefixes
        return victim

    @property
    def tree(self) -> RadixTree:
        return self.cache._tree

    # What an engine does around the cache.

    def give_back(self, freed: FreedSlots, expected: Freed) -> None:
        assert freed_sets(freed) == expected
        self.kv.release(freed.kv_slots)
        self.states.release(freed.state_slots)

    def take_kv(self, n: int) -> list[int] | None:
        if n > self.kv.num_free + self.cache.num_evictable_kv:
            self.fail_to_take(self.supply.take_kv, n)
            return None
        missing = n - self.kv.num_free
        self.order = self.tree.kv_order
        slots = self.supply.take_kv(n).tolist()
        self.naive.evict_kv(missing, self.next_kv_victim)
        assert not self.victims
        return slots

    def take_states(self, n: int) -> list[int]:
        """As many as there are, up to `n`: a checkpoint that finds no slot is skipped."""
        available = self.states.num_free + self.cache.num_evictable_states
        if n > available:
            self.fail_to_take(self.supply.take_states, n)
        n = min(n, available)
        missing = n - self.states.num_free
        self.order = self.tree.state_order
        slots = self.supply.take_states(n).tolist()
        self.naive.evict_state(missing, self.next_state_victim)
        assert not self.victims
        return slots

    def fail_to_take(self, take: Callable[[int], object], n: int) -> None:
        """More than is free or evictable: nothing is evicted for it, and no slot moves."""
        free = self.kv.free_slots().tolist(), self.states.free_slots().tolist()
        with pytest.raises(PoolExhausted):
            take(n)
        assert (self.kv.free_slots().tolist(), self.states.free_slots().tolist()) == free
        assert not self.victims

    def take_lock(self, node, *, with_state: bool) -> Lock:
        prefix = prefix_of(node)
        receipt = self.cache.lock(node) if with_state else self.cache.lock_kv(node)
        return Lock(receipt, self.naive.lock(prefix, with_state=with_state))

    def drop_lock(self, lock: Lock) -> None:
        self.give_back(self.cache.unlock(lock.receipt), self.naive.unlock(lock.naive))
        with pytest.raises(ValueError, match="no lock is held"):
            self.cache.unlock(lock.receipt)

    def insert(self, request: Request, lengths: list[int]):
        """Inserts checkpoints of a request's computed tokens; the result's duplicates are released."""
        lengths = [min(length, len(request.row)) for length in lengths if request.row]
        slots = self.take_states(len(lengths))
        checkpoints = [checkpoint(n, slot, f"at {n}") for n, slot in zip(lengths, slots, strict=False)]
        tokens = request.tokens[: len(request.row)]
        result = self.cache.insert(
            ints(tokens), ints(request.row), checkpoints, protected_length=request.protected_length
        )
        expected = self.naive.insert(tokens, request.row, checkpoints, request.protected_length)
        assert result.kv_length == max(lengths[: len(slots)], default=0)
        assert prefix_of(result.node) == tokens[: result.kv_length]
        assert result.kv_slots.tolist() == expected.kv_slots
        assert result.duplicate_kv_slots.tolist() == expected.duplicate_kv_slots
        assert result.duplicate_state_slots.tolist() == expected.duplicate_state_slots
        assert result.num_attached == len(slots) - len(expected.duplicate_state_slots)
        self.kv.release(result.duplicate_kv_slots)
        self.states.release(result.duplicate_state_slots)
        return result

    def end(self, request: Request, lengths: list[int]) -> None:
        result = self.insert(request, lengths)
        self.kv.release(request.row[max(result.kv_length, request.protected_length) :])
        if request.lock is not None:
            self.drop_lock(request.lock)

    # Requests.

    @rule(tokens=sequences, lengths=some_lengths.filter(len))
    def serve_without_match(self, tokens, lengths):
        own = self.take_kv(len(tokens))
        if own is not None:
            self.end(Request(tokens, own), lengths)

    @precondition(lambda self: len(self.requests) < 4)
    @rule(tokens=sequences, match=st.booleans(), with_state=st.booleans(), num_new=st.integers(0, MAX_LENGTH))
    def admit(self, tokens, match, with_state, num_new):
        """Locks what matches before anything is evicted for it; undoes that if the slots don't suffice."""
        request = Request(tokens)
        if match:
            found = self.cache.match(ints(tokens))
            request.lock = self.take_lock(found.node, with_state=with_state)
            request.row = found.kv_slots.tolist()
            request.protected_length = found.state_length
        own = self.take_kv(min(num_new, len(tokens) - len(request.row)))
        if own is not None:
            request.row += own
            self.requests.append(request)
        elif request.lock is not None:
            self.drop_lock(request.lock)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, more=sequences, lengths=some_lengths, with_state=st.booleans())
    def proceed(self, pick, more, lengths, with_state):
        """Computes more of the prompt or, past its end, new tokens; keeps checkpoints and locks up to the deepest."""
        request = self.requests[pick % len(self.requests)]
        own = self.take_kv(len(more))
        if own is not None:
            request.row += own
            missing = max(0, len(request.row) - len(request.tokens))
            request.tokens += more[:missing]
        result = self.insert(request, lengths)
        request.row[: result.kv_length] = result.kv_slots.tolist()
        if result.kv_length > request.protected_length:
            old, request.lock = request.lock, self.take_lock(result.node, with_state=with_state)
            request.protected_length = result.kv_length
            if old is not None:
                self.drop_lock(old)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, lengths=some_lengths)
    def finish(self, pick, lengths):
        self.end(self.requests.pop(pick % len(self.requests)), lengths)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def abort(self, pick):
        request = self.requests.pop(pick % len(self.requests))
        self.kv.release(request.row[request.protected_length :])
        if request.lock is not None:
            self.drop_lock(request.lock)

    # Locks of any node, and their parts.

    @precondition(lambda self: len(self.locks) < 3 and self.cache.num_nodes)
    @rule(pick=picks, with_state=st.booleans())
    def lock_any_node(self, pick, with_state):
        nodes = [self.cache.root, *sorted(self.cache.nodes(), key=prefix_of)]
        self.locks.append(self.take_lock(nodes[pick % len(nodes)], with_state=with_state))

    @precondition(lambda self: self.all_locks())
    @rule(pick=picks)
    def release_state(self, pick):
        locks = self.all_locks()
        lock = locks[pick % len(locks)]
        lock.receipt.release_state()
        self.naive.release_state(lock.naive)

    @precondition(lambda self: self.locks)
    @rule(pick=picks)
    def unlock(self, pick):
        self.drop_lock(self.locks.pop(pick % len(self.locks)))

    # Eviction.

    @precondition(lambda self: self.cache.num_nodes > 1)
    @rule(n=st.sampled_from([0, 1, 2, 3, 99]))
    def evict_kv(self, n):
        evictable = self.cache.num_evictable_kv
        self.order = self.tree.kv_order
        freed = self.cache.evict_kv(n)
        assert len(freed.kv_slots) >= min(n, evictable)
        self.give_back(freed, self.naive.evict_kv(n, self.next_kv_victim))
        assert not self.victims

    @precondition(lambda self: self.cache.num_nodes > 1)
    @rule(n=st.sampled_from([0, 1, 2, 3, 99]))
    def evict_state(self, n):
        evictable = self.cache.num_evictable_states
        self.order = self.tree.state_order
        freed = self.cache.evict_state(n)
        assert len(freed.state_slots) == min(n, evictable)
        self.give_back(freed, self.naive.evict_state(n, self.next_state_victim))
        assert not self.victims

    @precondition(lambda self: self.cache.num_nodes > 2)
    @rule(excess=st.integers(1, 3))
    def ask_for_too_much(self, excess):
        self.fail_to_take(self.supply.take_kv, self.kv.num_free + self.cache.num_evictable_kv + excess)
        self.fail_to_take(self.supply.take_states, self.states.num_free + self.cache.num_evictable_states + excess)

    @precondition(lambda self: self.cache.num_nodes > 3 and not self.all_locks())
    @rule()
    def reset(self):
        self.give_back(self.cache.reset(), self.naive.reset())

    # Comparison.

    def compare_match(self, tokens: Prefix) -> None:
        found = self.cache.match(ints(tokens))
        prefix, kv_length = self.naive.match(tokens)
        assert prefix_of(found.node) == prefix
        assert (found.state_length, found.kv_length) == (len(prefix), kv_length)
        assert (found.state_slot, found.origin) == self.naive.states.get(prefix, (None, None))
        assert found.kv_slots.tolist() == [self.naive.kv[prefix[:n]] for n in range(1, len(prefix) + 1)]

    def compare_path(self, node: Node) -> None:
        prefix = prefix_of(node)
        assert self.cache.path_tokens(node).tolist() == list(prefix)
        assert self.cache.path_kv_slots(node).tolist() == [self.naive.kv[prefix[: n + 1]] for n in range(len(prefix))]

    def all_locks(self) -> list[Lock]:
        return self.locks + [request.lock for request in self.requests if request.lock is not None]

    @invariant()
    def tree_is_sound_and_equals_the_model(self):
        self.cache.check()
        assert kv_contents(self.cache) == self.naive.kv
        assert state_contents(self.cache) == self.naive.states
        for node in self.cache.nodes():
            self.compare_path(node)
            assert node.num_hits == self.naive.num_hits.get(prefix_of(node), 0)
        assert not self.victims, "a state was shown that did not go by eviction"
        for lock in self.all_locks():
            assert prefix_of(lock.receipt.node) == lock.naive.prefix
            assert lock.receipt.holds_state == lock.naive.holds_state

    @precondition(lambda self: self.all_locks())
    @invariant()
    def locked_cache_refuses_reset(self):
        with pytest.raises(ValueError, match="locks are held"):
            self.cache.reset()

    @invariant()
    def matches_equal_the_model(self):
        for prefix in [(), *self.naive.kv]:
            for last in (0, 1):
                self.compare_match((*prefix, last))
                self.compare_match((*prefix, last, 0))

    @invariant()
    def counters_equal_the_model(self):
        evictable_kv = sum(not self.naive.is_kv_locked(prefix) for prefix in self.naive.kv)
        evictable_states = sum(not self.naive.is_state_locked(prefix) for prefix in self.naive.states)
        assert self.cache.num_kv_slots == len(self.naive.kv)
        assert self.cache.num_evictable_kv == evictable_kv
        assert self.cache.num_protected_kv == len(self.naive.kv) - evictable_kv
        assert self.cache.num_state_slots == len(self.naive.states)
        assert self.cache.num_evictable_states == evictable_states
        assert self.cache.num_protected_states == len(self.naive.states) - evictable_states

    @invariant()
    def every_slot_has_one_owner(self):
        held_kv = [slot for request in self.requests for slot in request.row[request.protected_length :]]
        kv_slots = [*self.kv.free_slots(), *self.cache.owned_kv_slots(), *held_kv]
        assert sorted(kv_slots) == list(range(1, self.kv.num_slots + 1))
        state_slots = [*self.states.free_slots(), *self.cache.owned_state_slots()]
        assert sorted(state_slots) == list(range(1, self.states.num_slots + 1))

    @invariant()
    def protected_rows_are_the_trees(self):
        for request in self.requests:
            prefixes = [request.tokens[:n] for n in range(1, request.protected_length + 1)]
            assert request.row[: request.protected_length] == [self.naive.kv[prefix] for prefix in prefixes]

    def teardown(self):
        """Idle again: no lock is left, so everything can be evicted."""
        if not hasattr(self, "cache"):
            return
        while self.requests:
            self.abort(0)
        while self.locks:
            self.unlock(0)
        assert all(node.kv_lock == node.state_lock == 0 for node in [self.cache.root, *self.cache.nodes()])
        self.evict_kv(self.kv.num_slots)
        assert self.kv.num_free == self.kv.num_slots
        assert self.states.num_free == self.states.num_slots


class LRUMachine(RadixMachine):
    """The model knows the victim."""

    policy = "lru"

    def next_kv_victim(self, leaves):
        victim = super().next_kv_victim(leaves)
        assert victim == self.naive.oldest_kv(leaves)
        return victim

    def next_state_victim(self, prefixes):
        victim = super().next_state_victim(prefixes)
        assert victim == self.naive.oldest_state(prefixes)
        return victim


class CostMachine(RadixMachine):
    """What a member is worth depends on all that happened; that the victim has the lowest priority does not."""

    policy = "cost"

    def witness(self, node):
        super().witness(node)
        order = cast(CostKVOrder | CostStateOrder, self.order)
        candidates = [member for member in order if order is self.tree.state_order or not member.children]
        assert order.priority(node) == min(map(order.priority, candidates))


# An example takes milliseconds and the interesting trees are rare: never fewer than 100 of them.
TestLRUMachine = LRUMachine.TestCase
TestCostMachine = CostMachine.TestCase
TestLRUMachine.settings = TestCostMachine.settings = settings(
    deadline=None, max_examples=max(100, settings().max_examples)
)

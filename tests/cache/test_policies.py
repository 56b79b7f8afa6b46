"""The orders of eviction: the heap, what `cost` learns and prefers, and both policies under random users."""

from __future__ import annotations

import random
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from hybrid_runtime.cache import marks
from hybrid_runtime.cache.eviction import make_orders
from hybrid_runtime.cache.lazy_heap import LazyHeap
from hybrid_runtime.cache.marks import MARK_INTERVAL
from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.reuse import GHOSTS_PER_STATE, MEMORY, Kind, ReuseHistory
from hybrid_runtime.memory.slots import no_slots
from tests.cache.helpers import POLICIES, Prefix, checkpoint, ints, prefix_of, state_contents
from tests.cache.naive_cost import NaiveCost

LENGTHS = (1, 2, 3, 5, 8, 13)


class Priority(float):
    """A number that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other):
        Priority.num_compared += 1
        return float(self) < float(other)

    def __eq__(self, other):
        Priority.num_compared += 1
        return float(self) == float(other)

    __hash__ = float.__hash__


def new_nodes(number):
    root = Node(None, ints([]), no_slots())
    return [Node(root, ints([token]), ints([token + 1])) for token in range(number)]


@pytest.mark.parametrize("seed", range(5))
def test_a_heap_is_a_sorted_list(seed):
    rng = random.Random(seed)
    heap, nodes, places = LazyHeap(), new_nodes(20), {}
    for step in range(2000):
        node = rng.choice(nodes)
        if rng.random() < 0.7:
            priority = rng.choice([0.0, 0.5, rng.random()])
            heap.set(node, priority)
            places[node] = priority, step
        else:
            heap.discard(node)
            places.pop(node, None)
        expected = sorted(places, key=places.__getitem__)
        assert heap.first() is (expected[0] if expected else None)
        assert list(heap) == expected
        assert len(heap) == len(expected)
        assert (node in heap) == (node in places)
        assert all(heap.priority(each) == places[each][0] for each in expected)
        assert heap.num_entries <= 2 * len(heap) + 16


@pytest.mark.parametrize("exponent", [6, 9, 12])
def test_a_heap_compares_no_more_than_a_few_times_the_logarithm(exponent):
    rng, size = random.Random(0), 2**exponent
    heap, nodes = LazyHeap(), new_nodes(size)
    for node in nodes:
        heap.set(node, Priority(rng.random()))
    Priority.num_compared, num_steps = 0, 4 * size
    for _ in range(num_steps):
        heap.set(rng.choice(nodes), Priority(rng.random()))
        first = heap.first()
        assert first is not None
        heap.discard(first)
        heap.set(first, Priority(1 + rng.random()))
    assert Priority.num_compared <= 12 * exponent * num_steps


def test_what_was_learned_long_ago_counts_less():
    kind = Kind()
    assert (kind.chance, kind.mean_wait) == (0.5, 0)
    for _ in range(20 * MEMORY):
        kind.count_state()
        kind.count_use(7.0)
    assert kind.chance > 0.99
    assert kind.mean_wait == pytest.approx(7, rel=0.01)
    for _ in range(2 * MEMORY):
        kind.count_state()
    assert kind.chance < 0.15


def test_a_kind_never_has_more_uses_than_states():
    kind = Kind()
    kind.count_use(1.0)
    kind.count_use(1.0)
    kind.uncount_state()
    assert kind.chance == 1


class Checked:
    """Stands before the state order of `cost`, and does the same to a `NaiveCost`."""

    def __init__(self, order: Any, interval: int) -> None:
        self.order = order
        self.naive = NaiveCost(interval)

    def add(self, node):
        prefix = prefix_of(node)
        if prefix in self.naive.states:
            self.naive.use(prefix)
        else:
            locked, above = [], node.parent
            while above is not None:
                locked += [prefix_of(above)] if above.state_lock else []
                above = above.parent
            source = self.naive.arrive(prefix, node.origin, locked)
            if source is not None and source not in locked:
                self.naive.place(source)
        self.naive.place(prefix)
        self.order.add(node)

    def touch(self, node):
        self.naive.place(prefix_of(node))
        self.order.touch(node)

    def forget(self, node):
        self.naive.evict(prefix_of(node), [prefix_of(each) for each in self.order])
        self.order.forget(node)

    def compare(self):
        for node in self.order:
            assert self.order.value(node) == pytest.approx(self.naive.value(prefix_of(node)))
            assert self.order.priority(node) == pytest.approx(self.naive.states[prefix_of(node)].priority)
        assert self.order.clock == pytest.approx(self.naive.clock)
        lowest = min((self.order.priority(node) for node in self.order), default=None)
        victim = self.order.victim()
        assert (victim and self.order.priority(victim)) == lowest

    def __getattr__(self, name):
        return getattr(self.order, name)

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


class User:
    """Does random things to a cache, over an alphabet of two tokens."""

    def __init__(self, policy: str, seed: int) -> None:
        self.cache = RadixCache(policy)
        self.rng = random.Random(seed)
        self.receipts: list = []
        self.kv = iter(range(1, 10**6))
        self.states = iter(range(1, 10**6))
        self.evicted: list[tuple] = []

    def step(self) -> None:
        act = self.rng.choice([self.insert, self.insert, self.insert, self.lock, self.lock, self.release, self.evict])
        act()

    def insert(self) -> None:
        tokens = ints(self.rng.choices([0, 1], k=self.rng.choice(LENGTHS)))
        slots = ints(next(self.kv) for _ in tokens)
        own = self.cache.match(np.append(tokens, ints([0])))
        slots[: own.state_length] = own.kv_slots
        lengths = sorted(self.rng.sample(range(1, len(tokens) + 1), k=min(len(tokens), self.rng.choice([1, 1, 2]))))
        origins = ["junction", "tail"][-len(lengths) :]
        states = [checkpoint(n, next(self.states), origin) for n, origin in zip(lengths, origins, strict=True)]
        self.cache.insert(tokens, slots, states, protected_length=own.state_length)

    def lock(self) -> None:
        node = self.cache.match(ints(self.rng.choices([0, 1], k=14))).node
        lock = self.rng.choice([self.cache.lock, self.cache.lock, self.cache.lock_kv])
        self.receipts.append(lock(node))

    def release(self) -> None:
        if self.receipts:
            receipt = self.receipts.pop(self.rng.randrange(len(self.receipts)))
            if self.rng.random() < 0.5:
                receipt.release_state()
                self.receipts.append(receipt)
            else:
                self.cache.unlock(receipt)

    def evict(self) -> None:
        for evict in (self.cache.evict_kv, self.cache.evict_state):
            before = set(state_contents(self.cache))
            evict(self.rng.choice([0, 1, 1, 3]))
            self.evicted.append(tuple(sorted(before - set(state_contents(self.cache)))))


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_priorities_are_what_whole_prefixes_say(seed, interval, monkeypatch):
    monkeypatch.setattr(marks, "MARK_INTERVAL", interval)
    checked: list[Checked] = []

    def make(policy):
        kv_order, state_order = make_orders(policy)
        checked.append(Checked(state_order, interval))
        return kv_order, checked[0]

    monkeypatch.setattr("hybrid_runtime.cache.tree.make_orders", make)
    user = User("cost", seed)
    for _ in range(200):
        user.step()
        checked[0].compare()
    assert checked[0].naive.clock > 0
    assert any(kind is None for _, kind, _ in checked[0].naive.ghosts), "no evicted state came back"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_members_are_right_and_only_leaves_give_up_kv(policy, seed):
    user = User(policy, seed)
    for _ in range(300):
        user.step()
        user.cache.check()
        kv_order: Any = user.cache._tree.kv_order
        victim = kv_order.victim()
        assert victim is None or not victim.children
        if policy == "cost" and victim is not None:
            leaves = [node for node in kv_order if not node.children]
            assert kv_order.priority(victim) == min(kv_order.priority(node) for node in leaves)
    for receipt in user.receipts:
        user.cache.unlock(receipt)
    user.cache.evict_kv(10**6)
    user.cache.check()
    assert user.cache.num_nodes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_history_evicts_the_same(policy):
    first, second = User(policy, seed=1), User(policy, seed=1)
    for _ in range(400):
        first.step()
        second.step()
    assert first.evicted == second.evicted
    assert sum(len(each) for each in first.evicted) > 50


class Served:
    """A cache behind a small pool of states, and requests that leave a tail one before their end."""

    def __init__(self, num_states: int) -> None:
        self.cache = RadixCache("cost")
        self.free = list(range(num_states, 0, -1))
        self.next_kv = iter(range(1, 10**9))

    @property
    def order(self) -> Any:
        return self.cache._tree.state_order

    @property
    def history(self) -> ReuseHistory:
        return self.order._history

    def request(self, tokens: np.ndarray) -> int:
        match = self.cache.match(tokens)
        receipt = self.cache.lock(match.node)
        receipt.release_state()
        tail = len(tokens) - 1
        if match.state_length < tail:
            if not self.free:
                self.free += self.cache.evict_state(1).state_slots.tolist()
            slots = np.concatenate([match.kv_slots, ints(next(self.next_kv) for _ in range(tail - match.state_length))])
            states = [checkpoint(tail, self.free.pop())]
            self.cache.insert(tokens[:tail], slots, states, protected_length=match.state_length)
        self.cache.unlock(receipt)
        return match.state_length

    def kept(self) -> list[Prefix]:
        return list(state_contents(self.cache))


_firsts = count(0, 1000)


def fresh(length):
    """Tokens that no one has seen."""
    return np.arange(length, dtype=np.int32) + next(_firsts)


def test_a_turn_that_was_overtaken_goes_before_the_next_one():
    served = Served(100)
    for _ in range(20):
        turn = fresh(200)
        for _ in range(3):
            served.request(turn)
            turn = np.concatenate([turn, fresh(20)])
    served.cache.evict_state(40)
    lengths = [len(prefix) for prefix in served.kept()]
    assert len(lengths) == 20
    assert lengths.count(239) >= 17, "only the first ones could not be known"


def test_a_prefix_that_many_share_outlives_longer_tails():
    served, shared = Served(8), fresh(64)
    served.request(np.append(shared, ints([0])))
    for _ in range(200):
        served.request(np.concatenate([shared, fresh(100)]))
    assert tuple(shared.tolist()) in served.kept()
    assert served.request(np.concatenate([shared, fresh(9)])) == 64


def test_of_two_states_the_one_that_saves_more_tokens_stays():
    served = Served(2)
    long, short, other = fresh(300), fresh(30), fresh(40)
    for tokens in (long, short, other):
        served.request(tokens)
    assert sorted(map(len, served.kept())) == [39, 299]


def test_an_evicted_conversation_is_recognised_when_it_returns():
    served = Served(1)
    for _ in range(30):
        turn = fresh(500)
        served.request(turn)
        served.request(fresh(900))  # takes the slot
        served.request(np.concatenate([turn, fresh(20)]))
    kinds = served.history._kinds
    assert kinds["tail", "new", 2].chance < kinds["tail", "new", 0].chance
    assert kinds["tail", "new", 0].chance > 0.3, "no use was counted of the turns that had been evicted"


def test_the_memory_of_evicted_states_is_bounded():
    served = Served(3)
    for _ in range(100):
        served.request(fresh(2 * MARK_INTERVAL))
    assert served.history.num_ghosts == 3 * GHOSTS_PER_STATE
    assert len(served.history) == 3


def test_a_state_that_is_evicted_again_is_remembered_anew():
    served, tokens = Served(1), fresh(100)
    served.request(tokens)
    for num_others in (GHOSTS_PER_STATE - 2, 4, GHOSTS_PER_STATE + 2):
        for _ in range(num_others):
            served.request(fresh(100))
        served.request(tokens)
        kind = served.history.records[served.cache.match(tokens).node].kind
        assert (kind is served.history._kinds["tail", None]) == (num_others <= GHOSTS_PER_STATE)


def test_kv_that_is_not_used_grows_old():
    cache = RadixCache("cost")
    for place in range(4):
        cache.insert(ints([place, 9]), ints([2 * place + 1, 2 * place + 2]), [checkpoint(2, place + 1)])
        if place == 2:  # the more that came and were never used, the less is expected of the next
            cache.evict_kv(1)
            assert state_contents(cache).keys() == {(0, 9), (1, 9)}
    victims: list[Prefix] = []
    for _ in range(3):
        before = state_contents(cache).keys()
        cache.evict_kv(1)
        victims += before - state_contents(cache).keys()
    assert victims == [(1, 9), (0, 9), (3, 9)]


def test_what_the_clock_would_overtake_before_its_use_is_next_to_go():
    served = Served(50)
    order = served.order
    tokens = fresh(100)
    served.request(tokens)
    node = served.cache.match(tokens).node
    kind = served.history.records[node].kind
    for wait, worthless in [(200.0, False), (10_000.0, True)]:
        kind.count_use(wait)
        assert (order.value(node) == 0) == worthless
        order.touch(node)
        assert (order.priority(node) == order.clock) == worthless


def test_lengths_in_other_units_give_the_same_evictions():
    """With blocks of 64 and 128 equal tokens for each token of a random history."""

    def run(scale):
        served, rng, evicted = Served(6), random.Random(0), []
        for _ in range(300):
            blocks = rng.choices(range(3), k=rng.choice(LENGTHS))
            served.request(np.append(np.repeat(ints(blocks), scale), ints([9])))
            evicted.append(sorted(tuple(prefix[::scale]) for prefix in served.kept()))
        return evicted

    assert run(MARK_INTERVAL) == run(2 * MARK_INTERVAL)


@pytest.mark.parametrize("policy", ["", "fifo"])
def test_an_unknown_policy_is_refused(policy):
    with pytest.raises(ValueError, match=rf"\['cost', 'lru'\], got '{policy}'"):
        partial(RadixCache, policy)()

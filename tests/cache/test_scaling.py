"""What an operation costs: nothing for what else is free, at most a logarithm for what else is in the tree, and at most
a share per node for the depth of its own path.

Counted, not timed: bytecodes executed in the package's own code, and memory touched by temporaries (which is where a
copy or a scan inside NumPy would show).
"""

from __future__ import annotations

import math
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from hybrid_runtime.cache.marks import MARK_INTERVAL
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.memory.allocator import SlotAllocator
from tests.cache.helpers import POLICIES, checkpoint, ints

PROMPT = list(range(100, 164))
FIRST_OWN_SLOT = 1_000_000
FEW, MANY = 10, 1000
by_policy = pytest.mark.parametrize("policy", POLICIES)


def crowded_cache(policy: str, num_others: int) -> RadixCache:
    """`PROMPT` with checkpoints at 32 and 63, and sequences that part from it at the root, inside an edge and at 32."""
    cache = RadixCache(policy)
    kv, states = 1, 1
    for other in range(num_others):
        for shared in (0, 20, 32):
            tokens = [*PROMPT[:shared], 1000 + other, 1, 2, 3]
            cache.insert(ints(tokens), ints(range(kv, kv + len(tokens))), [checkpoint(len(tokens), states)])
            kv, states = kv + len(tokens), states + 1
    cache.insert(ints(PROMPT), ints(range(kv, kv + 64)), [checkpoint(32, states), checkpoint(63, states + 1)])
    return cache


def chain(policy: str, depth: int) -> RadixCache:
    """One sequence of `depth` tokens with a state after each."""
    cache = RadixCache(policy)
    tokens = np.arange(depth, dtype=np.int32)
    cache.insert(tokens, tokens + 1, [checkpoint(n, n) for n in range(1, depth + 1)])
    return cache


# Each prepares on a cache and a prompt that it holds, and returns the call whose work is counted.


def match(cache, prompt):
    return lambda: cache.match(ints(prompt))


def lock(cache, prompt):
    node = cache.match(ints(prompt)).node
    return lambda: cache.lock(node)


def release_state(cache, prompt):
    return cache.lock(cache.match(ints(prompt)).node).release_state


def unlock(cache, prompt):
    receipt = cache.lock(cache.match(ints(prompt)).node)
    return lambda: cache.unlock(receipt)


def insert(cache, prompt):
    """Splits an edge where there is one to split, and appends."""
    tokens = [*prompt[:-3], 7, 8, 9]
    slots = ints(range(FIRST_OWN_SLOT, FIRST_OWN_SLOT + len(tokens)))
    checkpoints = [checkpoint(25, FIRST_OWN_SLOT), checkpoint(len(tokens), FIRST_OWN_SLOT + 1)]
    return lambda: cache.insert(ints(tokens), slots, checkpoints)


def insert_again(cache, prompt):
    slots = ints(range(FIRST_OWN_SLOT, FIRST_OWN_SLOT + len(prompt)))
    return lambda: cache.insert(ints(prompt), slots, [checkpoint(len(prompt) - 1, FIRST_OWN_SLOT)])


def evict_kv(cache, prompt):
    return lambda: cache.evict_kv(6)


def evict_state(cache, prompt):
    return lambda: cache.evict_state(3)


def path_kv_slots(cache, prompt):
    node = cache.match(ints(prompt)).node
    return lambda: cache.path_kv_slots(node)


OPERATIONS = [match, lock, release_state, unlock, insert, insert_again, evict_kv, evict_state, path_kv_slots]
every_operation = pytest.mark.parametrize("prepare", OPERATIONS, ids=lambda operation: operation.__name__)


def count_bytecodes(call: Callable[[], object]) -> int:
    """Bytecodes executed in frames of the package."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "hybrid_runtime" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return count


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@by_policy
@every_operation
def test_steps_grow_at_most_logarithmically_with_other_nodes(prepare, policy):
    few, many = (count_bytecodes(prepare(crowded_cache(policy, n), PROMPT)) for n in (FEW, MANY))
    assert 0 < many <= few * math.log(3 * MANY) / math.log(3 * FEW)
    if policy == "lru":
        assert few == many


@by_policy
@every_operation
def test_temporaries_do_not_depend_on_other_nodes(prepare, policy):
    """A container that grows in the call may reallocate; a list or an array of all nodes here is over 20 kB."""
    assert peak_bytes(prepare(crowded_cache(policy, MANY), PROMPT)) < 15_000


@by_policy
@every_operation
def test_steps_grow_at_most_linearly_with_the_depth_of_the_path(prepare, policy):
    """Twice the increase of the depth costs twice as many steps more."""
    near, far, farther = (count_bytecodes(prepare(chain(policy, n), list(range(n)))) for n in (50, 100, 200))
    assert near > 0
    assert farther - far <= 2.2 * (far - near) + 100


class Untouchable:
    """In place of a key or of slots: any use fails."""

    def __getattr__(self, name):
        raise AssertionError(f"a node off the path was read ({name})")

    def __len__(self):
        raise AssertionError("a node off the path was read (len)")


@by_policy
@pytest.mark.parametrize("prepare", OPERATIONS[:6], ids=lambda operation: operation.__name__)
def test_only_nodes_on_the_path_are_read(prepare, policy):
    cache = crowded_cache(policy, FEW)
    call = prepare(cache, PROMPT)
    on_path = {PROMPT[0], PROMPT[20], PROMPT[32]}
    off_path = [node for node in cache.nodes() if int(node.key[0]) not in on_path]
    assert len(off_path) == 3 * FEW
    for node in off_path:
        node.key_bytes = node.kv_slots = cast(Any, Untouchable())
    call()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_edge_costs_as_many_steps_as_a_short_one(policy):
    """Keys are compared by memory: a longer key costs bytes, not steps. `cost` names what it evicts, mark by mark."""

    def steps(length):
        cache = RadixCache(policy)
        tokens = np.arange(length, dtype=np.int32)
        cache.insert(tokens, tokens + 1, [checkpoint(length - 1, 1)])
        other = np.concatenate([tokens[: length // 2], tokens[:3]])
        others_slots = np.arange(len(other), dtype=np.int32) + length + 1
        calls = [
            lambda: cache.match(tokens),
            lambda: cache.match(other),
            lambda: cache.unlock(cache.lock(cache.match(tokens).node)),
            lambda: cache.insert(other, others_slots, [checkpoint(len(other), 2)]),
            lambda: cache.evict_state(1),
            lambda: cache.evict_kv(1),
        ]
        return [count_bytecodes(call) for call in calls]

    short, long = steps(1_000), steps(100_000)
    assert short[:4] == long[:4]
    for few, many in zip(short[4:], long[4:], strict=True):
        assert many - few <= (25 * 100_000 / MARK_INTERVAL if policy == "cost" else 0)


def take_and_give_back_some(allocator):
    allocator.release(allocator.allocate(50))


def refuse_a_second_release(allocator):
    slots = allocator.allocate(1)
    allocator.release(slots)
    with pytest.raises(ValueError, match="twice"):
        allocator.release(slots)


@pytest.mark.parametrize("work", [take_and_give_back_some, refuse_a_second_release], ids=lambda work: work.__name__)
def test_allocator_cost_depends_neither_on_the_pool_nor_on_what_is_free(work):
    steps = []
    for num_slots, num_taken in [(100, 0), (100, 50), (1_000_000, 0), (1_000_000, 999_950)]:
        allocator = SlotAllocator(num_slots)
        allocator.allocate(num_taken)
        work(allocator)
        assert peak_bytes(partial(work, allocator)) < 15_000
        steps.append(count_bytecodes(partial(work, allocator)))
    assert len(set(steps)) == 1
    assert steps[0] < 500


def test_allocator_steps_do_not_depend_on_the_number_of_slots():
    def take_and_give_back(num_slots):
        allocator.release(allocator.allocate(num_slots))

    allocator = SlotAllocator(10_000)
    few, many = (count_bytecodes(partial(take_and_give_back, n)) for n in (10, 10_000))
    assert few == many

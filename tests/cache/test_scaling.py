"""What an operation costs does not depend on what else is in the cache, nor on the pools' sizes.

Counted, not timed: bytecodes executed in the cache's own code, bytes handed to key comparison, and memory touched by
temporaries (which is where a copy or a scan inside NumPy would show).
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.memory.allocator import SlotAllocator
from tests.cache.helpers import checkpoint, ints

PROMPT = list(range(100, 164))
FIRST_OWN_SLOT = 1_000_000


def crowded_cache(num_others: int) -> RadixCache:
    """`PROMPT` with checkpoints at 32 and 63, and sequences that part from it at the root, inside an edge and at 32."""
    cache = RadixCache()
    kv, states = 1, 1
    for other in range(num_others):
        for shared in (0, 20, 32):
            tokens = [*PROMPT[:shared], 1000 + other, 1, 2, 3]
            cache.insert(ints(tokens), ints(range(kv, kv + len(tokens))), [checkpoint(len(tokens), states)])
            kv, states = kv + len(tokens), states + 1
    cache.insert(ints(PROMPT), ints(range(kv, kv + 64)), [checkpoint(32, states), checkpoint(63, states + 1)])
    return cache


def match(cache):
    cache.match(ints(PROMPT))


def lock_and_unlock(cache):
    cache.unlock(cache.lock(cache.match(ints(PROMPT)).node))


def insert(cache):
    tokens = [*PROMPT[:50], 7, 8, 9]
    slots = ints(range(FIRST_OWN_SLOT, FIRST_OWN_SLOT + len(tokens)))
    cache.insert(ints(tokens), slots, [checkpoint(25, FIRST_OWN_SLOT), checkpoint(53, FIRST_OWN_SLOT + 1)])


def evict_kv(cache):
    cache.evict_kv(6)


def evict_state(cache):
    cache.evict_state(3)


OPERATIONS = [match, lock_and_unlock, insert, evict_kv, evict_state]


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


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_steps_do_not_depend_on_other_nodes(operation):
    few, many = (count_bytecodes(partial(operation, crowded_cache(n))) for n in (10, 1000))
    assert 0 < few == many


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_temporaries_do_not_depend_on_other_nodes(operation):
    """A container that grows in the call may reallocate; a list or an array of all nodes here is over 20 kB."""
    assert peak_bytes(partial(operation, crowded_cache(1000))) < 15_000


@pytest.mark.parametrize("operation", [match, insert], ids=["match", "insert"])
def test_bytes_compared_do_not_depend_on_other_nodes(operation, monkeypatch):
    compared = []
    shared_length = Node.shared_length

    def counting(node, tokens):
        compared.append(min(len(node.key), len(tokens)))
        return shared_length(node, tokens)

    caches = [crowded_cache(n) for n in (10, 1000)]
    monkeypatch.setattr(Node, "shared_length", counting)
    totals = []
    for cache in caches:
        compared.clear()
        operation(cache)
        totals.append(sum(compared))
    assert 0 < totals[0] == totals[1] <= 3 * len(PROMPT)


def test_a_long_edge_costs_as_many_steps_as_a_short_one():
    """Keys are compared by memory: a longer key costs bytes, not steps."""

    def steps(length):
        cache = RadixCache()
        tokens = np.arange(length, dtype=np.int32)
        cache.insert(tokens, tokens + 1, [checkpoint(length - 1, 1)])
        return count_bytecodes(lambda: cache.match(tokens))

    assert steps(16) == steps(100_000)


@pytest.mark.parametrize("num_slots", [100, 1_000_000])
def test_allocator_cost_does_not_depend_on_the_pool(num_slots):
    allocator = SlotAllocator(num_slots)

    def take_and_give_back():
        allocator.release(allocator.allocate(50))

    take_and_give_back()
    assert peak_bytes(take_and_give_back) < 10_000
    assert count_bytecodes(take_and_give_back) < 500

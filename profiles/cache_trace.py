"""A trace of requests drawn from a seed, and what one of them asks of the prefix cache and the two allocators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.slots import StateSlot
from hybrid_runtime.scheduling.supply import SlotSupply

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class TraceShape:
    """Sequences of `min_len..max_len` tokens, those that continue no other one up to `max_first_len`."""

    num_requests: int = 2000
    min_len: int = 500
    max_len: int = 4000
    max_first_len: int = 3500
    max_added: int = 800
    root_len: int = 400
    num_roots: int = 32
    vocab_size: int = 50_000
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a run of the trace did; equal in every run of one trace, setting and policy."""

    num_hit_tokens: int
    num_evicted_tokens: int
    num_evicted_states: int


def make_trace(shape: TraceShape) -> list[Tokens]:
    """Half of the sequences are an earlier one with new tokens behind it; the others are a root with new tokens.

    Roots are drawn by a Zipf law of exponent 1, earlier sequences evenly from those that leave room.
    """
    rng = np.random.default_rng(shape.seed)
    roots = [rng.integers(shape.vocab_size, size=shape.root_len, dtype=np.int32) for _ in range(shape.num_roots)]
    weights = 1 / np.arange(1, shape.num_roots + 1)
    trace: list[Tokens] = []
    for _ in range(shape.num_requests):
        extendable = [tokens for tokens in trace if len(tokens) < shape.max_len]
        if extendable and rng.random() < 0.5:
            start = extendable[rng.integers(len(extendable))]
            length = rng.integers(len(start), min(shape.max_len, len(start) + shape.max_added)) + 1
        else:
            start = roots[rng.choice(shape.num_roots, p=weights / weights.sum())]
            length = rng.integers(shape.min_len, shape.max_first_len + 1)
        added = rng.integers(shape.vocab_size, size=length - len(start), dtype=np.int32)
        trace.append(np.concatenate([start, added]))
    return trace


def make_supply(num_kv_slots: int, num_state_slots: int, policy: str) -> SlotSupply:
    return SlotSupply(SlotAllocator(num_kv_slots), SlotAllocator(num_state_slots), RadixCache(policy))


def serve(supply: SlotSupply, tokens: Tokens) -> int:
    """What one request asks of cache and allocators, from admission to its end. Returns the tokens it found."""
    cache = supply.cache
    match = cache.match(tokens)
    receipt = cache.lock(match.node)
    own = supply.take_kv(len(tokens) - match.state_length)
    tail, final = supply.take_states(2).tolist()
    receipt.release_state()
    checkpoints = [
        Checkpoint(len(tokens) - 1, StateSlot(tail), "tail"),
        Checkpoint(len(tokens), StateSlot(final), "final"),
    ]
    row = np.concatenate([match.kv_slots, own])
    result = cache.insert(tokens, row, checkpoints, protected_length=match.state_length)
    supply.release_kv(result.duplicate_kv_slots)
    supply.release_states(result.duplicate_state_slots)
    supply.release(cache.unlock(receipt))
    return match.state_length


def run(trace: list[Tokens], supply: SlotSupply) -> Outcome:
    num_hit_tokens = sum(serve(supply, tokens) for tokens in trace)
    return Outcome(num_hit_tokens, supply.num_evicted_tokens, supply.num_evicted_states)

"""The slowest prefix cache that could be right: dictionaries from whole prefixes, no tree, no nodes, no counters.

A radix tree's nodes are an implementation detail: what is locked, freed and kept can be said of single tokens, each
named by the prefix that ends with it. A token goes when nothing extends it, no state sits on it and no lock runs
through it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybrid_runtime.cache.results import Checkpoint
from tests.cache.helpers import Prefix

Freed = tuple[list[int], list[int]]
"""Sorted KV slots and sorted state slots."""

Choose = Callable[[Sequence[Prefix]], Prefix]


@dataclass
class NaiveLock:
    prefix: Prefix
    holds_state: bool


@dataclass(frozen=True)
class NaiveInsert:
    kv_slots: list[int]
    duplicate_kv_slots: list[int]
    duplicate_state_slots: list[int]


class NaiveCache:
    def __init__(self) -> None:
        self.kv: dict[Prefix, int] = {}
        self.states: dict[Prefix, tuple[int, str]] = {}
        self.locks: list[NaiveLock] = []
        self.num_hits: dict[Prefix, int] = {}
        self._kv_used: dict[Prefix, int] = {}
        self._state_used: dict[Prefix, int] = {}
        self._clock = itertools.count()

    def is_kv_locked(self, prefix: Prefix) -> bool:
        return any(lock.prefix[: len(prefix)] == prefix for lock in self.locks)

    def is_state_locked(self, prefix: Prefix) -> bool:
        return any(lock.prefix == prefix and lock.holds_state for lock in self.locks)

    def num_children(self) -> Counter[Prefix]:
        return Counter(prefix[:-1] for prefix in self.kv)

    def match(self, tokens: Prefix) -> tuple[Prefix, int]:
        """The longest usable prefix with a state (empty if there is none), and the number of tokens with KV."""
        lengths = range(1, len(tokens))
        kv_length = max((n for n in lengths if tokens[:n] in self.kv), default=0)
        state_length = max((n for n in lengths if tokens[:n] in self.states), default=0)
        return tokens[:state_length], kv_length

    def insert(
        self, tokens: Prefix, kv_slots: Sequence[int], checkpoints: Sequence[Checkpoint], protected_length: int
    ) -> NaiveInsert:
        kv_length = max((checkpoint.length for checkpoint in checkpoints), default=0)
        duplicate_kv_slots = []
        for n in range(1, kv_length + 1):
            if tokens[:n] not in self.kv:
                self.kv[tokens[:n]] = kv_slots[n - 1]
            elif n > protected_length:
                duplicate_kv_slots.append(kv_slots[n - 1])
        duplicate_state_slots = []
        for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.length):
            prefix = tokens[: checkpoint.length]
            if prefix in self.states:
                duplicate_state_slots.append(int(checkpoint.state_slot))
            else:
                self.states[prefix] = (int(checkpoint.state_slot), checkpoint.origin)
            self._state_used[prefix] = next(self._clock)
        self._use_kv(tokens[:kv_length])
        tree_slots = [self.kv[tokens[:n]] for n in range(1, kv_length + 1)]
        return NaiveInsert(tree_slots, duplicate_kv_slots, duplicate_state_slots)

    def lock(self, prefix: Prefix, *, with_state: bool) -> NaiveLock:
        lock = NaiveLock(prefix, with_state and prefix in self.states)
        self.locks.append(lock)
        self.num_hits[prefix] = self.num_hits.get(prefix, 0) + lock.holds_state
        return lock

    def release_state(self, lock: NaiveLock) -> None:
        if lock.holds_state:
            lock.holds_state = False
            self._state_used[lock.prefix] = next(self._clock)

    def unlock(self, lock: NaiveLock) -> Freed:
        self.release_state(lock)
        self.locks = [other for other in self.locks if other is not lock]
        self._use_kv(lock.prefix)
        return sorted(self._prune(lock.prefix)), []

    def oldest_kv(self, leaves: Sequence[Prefix]) -> Prefix:
        return min(leaves, key=lambda prefix: self._kv_used[prefix])

    def oldest_state(self, prefixes: Sequence[Prefix]) -> Prefix:
        return min(prefixes, key=lambda prefix: self._state_used[prefix])

    def evict_kv(self, n: int, choose: Choose | None = None) -> Freed:
        """`choose` names the victim among those that may go; without it the least recently used goes."""
        kv_slots: list[int] = []
        state_slots: list[int] = []
        while len(kv_slots) < n:
            num_children = self.num_children()
            leaves = [prefix for prefix in self.kv if not num_children[prefix] and not self.is_kv_locked(prefix)]
            if not leaves:
                break
            leaf = (choose or self.oldest_kv)(leaves)
            if leaf in self.states:
                state_slots.append(self._pop_state(leaf))
            kv_slots += self._prune(leaf)
        return sorted(kv_slots), sorted(state_slots)

    def evict_state(self, n: int, choose: Choose | None = None) -> Freed:
        kv_slots: list[int] = []
        state_slots: list[int] = []
        while len(state_slots) < n:
            unlocked = [prefix for prefix in self.states if not self.is_state_locked(prefix)]
            if not unlocked:
                break
            victim = (choose or self.oldest_state)(unlocked)
            state_slots.append(self._pop_state(victim))
            kv_slots += self._prune(victim)
        return sorted(kv_slots), sorted(state_slots)

    def reset(self) -> Freed:
        freed = sorted(self.kv.values()), sorted(slot for slot, _ in self.states.values())
        self.kv, self.states, self._kv_used, self._state_used, self.num_hits = {}, {}, {}, {}, {}
        return freed

    def _use_kv(self, prefix: Prefix) -> None:
        now = next(self._clock)
        for n in range(1, len(prefix) + 1):
            self._kv_used[prefix[:n]] = now

    def _pop_state(self, prefix: Prefix) -> int:
        del self._state_used[prefix]
        slot, _ = self.states.pop(prefix)
        return slot

    def _prune(self, prefix: Prefix) -> list[int]:
        kv_slots = []
        num_children = self.num_children()
        while prefix and not num_children[prefix] and prefix not in self.states and not self.is_kv_locked(prefix):
            del self._kv_used[prefix]
            self.num_hits.pop(prefix, None)
            kv_slots.append(self.kv.pop(prefix))
            prefix = prefix[:-1]
            num_children[prefix] -= 1
        return kv_slots

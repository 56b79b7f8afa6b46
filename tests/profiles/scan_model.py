"""What the benchmark's trace does to a cache, worked out without a tree: states as (sequence, length) pairs in a table.

Between requests nothing is locked and every leaf has a state, so that the tree's tokens are the union of the prefixes
that have states, and everything about them follows from how long any two sequences of the trace agree.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from profiles.cache_trace import Outcome, Tokens


def common_lengths(trace: list[Tokens]) -> NDArray[np.int64]:
    """`[R, R]`: how many leading tokens each two sequences share.

    In sorted order two sequences share the least of what all neighbours between them share.
    """
    # Big-endian bytes compare as the tokens do.
    order = sorted(range(len(trace)), key=lambda i: trace[i].astype(">u4").tobytes())
    neighbours = [_common_length(trace[a], trace[b]) for a, b in itertools.pairwise(order)]
    common = np.zeros((len(trace), len(trace)), dtype=np.int64)
    for place, i in enumerate(order):
        common[i, i] = len(trace[i])
        after = np.minimum.accumulate(np.array(neighbours[place:], dtype=np.int64))
        common[i, order[place + 1 :]] = common[order[place + 1 :], i] = after
    return common


def _common_length(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


class ScanModel:
    """States in the order of their last use, the oldest first. Never more KV than there are slots."""

    def __init__(self, trace: list[Tokens], num_kv_slots: int, num_state_slots: int) -> None:
        self.trace = trace
        self.common = common_lengths(trace)
        self.num_kv_slots = num_kv_slots
        self.num_state_slots = num_state_slots
        self.states: list[tuple[int, int, str]] = []  # sequence, length, origin
        self.num_kv = 0
        self.num_hit_tokens = 0
        self.num_evicted_tokens = 0
        self.num_evicted_states = 0

    def run(self) -> Outcome:
        for i in range(len(self.trace)):
            self.serve(i)
        return Outcome(self.num_hit_tokens, self.num_evicted_tokens, self.num_evicted_states)

    def serve(self, i: int) -> None:
        num_tokens = len(self.trace[i])
        usable = [state for state in self.states if self._is_prefix(state, i, num_tokens - 1)]
        resumed = max(usable, key=lambda state: state[1], default=None)
        hit = 0 if resumed is None else resumed[1]
        self.num_hit_tokens += hit
        assert self.num_kv + num_tokens - hit <= self.num_kv_slots, "this model knows no eviction of KV"
        while len(self.states) + 2 > self.num_state_slots:
            self._evict(next(state for state in self.states if state is not resumed))
        if resumed is not None:
            self._use(resumed)
        self.num_kv += num_tokens - self._num_covered(i, num_tokens)
        for length, origin in [(num_tokens - 1, "tail"), (num_tokens, "final")]:
            present = next((state for state in self.states if state[1] == length and self._is_prefix(state, i)), None)
            if present is None:
                self.states.append((i, length, origin))
            else:
                self._use(present)

    def _is_prefix(self, state: tuple[int, int, str], i: int, max_length: int | None = None) -> bool:
        sequence, length, _ = state
        return length <= self.common[sequence, i] and (max_length is None or length <= max_length)

    def _num_covered(self, i: int, length: int) -> int:
        """Tokens of `trace[i][:length]` that lie below some state."""
        if not self.states:
            return 0
        sequences, lengths = np.array([state[:2] for state in self.states]).T
        return int(np.minimum(np.minimum(self.common[i, sequences], lengths), length).max())

    def _use(self, state: tuple[int, int, str]) -> None:
        self.states.remove(state)
        self.states.append(state)

    def _evict(self, state: tuple[int, int, str]) -> None:
        self.states.remove(state)
        freed = state[1] - self._num_covered(state[0], state[1])
        self.num_kv -= freed
        self.num_evicted_tokens += freed
        self.num_evicted_states += 1

"""A memory of what was evicted: only its name, to be able to say that it once was there."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.cache.node import TokenArray

DEFAULT_CAPACITY = 4096


class GhostIndex:
    """The lengths and fingerprints of the prefixes whose states were evicted last, at most `capacity` of them.

    A fingerprint is the sum of the tokens times random weights of their places, modulo 2^64, so those of all prefixes
    of a prompt come from one pass. Two prefixes may share one; what an answer is used for must allow that.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._members: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._num_of_length: Counter[int] = Counter()
        self._rng = np.random.default_rng(0)
        self._weights: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._members)

    def remember(self, tokens: TokenArray) -> None:
        """Notes that the state after `tokens` (int32 `[L]`, at least one) was evicted. O(L)."""
        # One dot product: this is done for every eviction, and costs less than finding the victim.
        member = (len(tokens), int(tokens.astype(np.uint64) @ self._first_weights(len(tokens))))
        if member in self._members:
            self._members.move_to_end(member)
            return
        self._members[member] = None
        self._num_of_length[len(tokens)] += 1
        if len(self._members) > self._capacity:
            (length, _), _ = self._members.popitem(last=False)
            self._num_of_length[length] -= 1
            if not self._num_of_length[length]:
                del self._num_of_length[length]

    def longest(self, tokens: TokenArray) -> int:
        """Length of the longest prefix of `tokens` that is remembered; 0 if none is. O(L + members)."""
        lengths = [length for length in self._num_of_length if length <= len(tokens)]
        if not lengths:
            return 0
        hashes = np.cumsum(tokens.astype(np.uint64) * self._first_weights(len(tokens)), dtype=np.uint64)
        return max((length for length in lengths if (length, int(hashes[length - 1])) in self._members), default=0)

    def clear(self) -> None:
        self._members.clear()
        self._num_of_length.clear()

    def _first_weights(self, count: int) -> NDArray[np.uint64]:
        if len(self._weights) < count:
            more = self._rng.integers(2**64, size=2 * count - len(self._weights), dtype=np.uint64)
            self._weights = np.concatenate([self._weights, more])
        return self._weights[:count]

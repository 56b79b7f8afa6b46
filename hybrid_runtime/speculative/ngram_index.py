"""Where the n-grams of one request's tokens occurred before: hash chains, as compressors of the LZ77 family keep them.

For each length of n-gram there are two tables of `window` positions: by hash, where an n-gram with this hash ended
last; and by position, where one with the same hash ended before. Chains need no deletion: an entry older than the
window is overwritten or lies behind the floor at which a walk stops. Only positions are kept, so an n-gram that is
found is compared with the tokens themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.speculative.draft import Int32Array

EDGE = 64
"""Tokens that are compared at both ends of what was indexed, to see whether it still precedes the new tokens."""
MAX_WALK = 256
"""Entries of a chain that are looked at: hashes may meet, and an n-gram may occur thousands of times."""
MANY = 32
"""From so many new tokens on, NumPy's fixed costs are worth it."""
_MULTIPLIER, _PRIME = 1_000_003, 2**31 - 1


class NgramIndex:
    """The n-grams of `min_ngram` to `max_ngram` tokens that end among the last `window` tokens of a request.

    Holds `8 * window` bytes per length of n-gram, whatever the request's length.
    """

    def __init__(self, min_ngram: int, max_ngram: int, window: int) -> None:
        self._lengths = range(min_ngram, max_ngram + 1)
        self._window = window
        self._latest = [array("i", bytes(4 * window)) for _ in self._lengths]
        self._earlier = [array("i", bytes(4 * window)) for _ in self._lengths]
        self._num_indexed = 0  # n-grams that end at or before this position are in the tables
        self._num_known = 0
        self._head, self._tail = b"", b""

    def precedes(self, tokens: Int32Array) -> bool:
        """Whether `tokens` go on from the tokens last extended to. O(1): `EDGE` tokens at both ends are compared.

        So tokens that were replaced in between are not noticed. What is looked up afterwards is right all the same, as
        it is compared with the tokens given; it may then not be the latest occurrence.
        """
        known = self._num_known
        return (  # of fewer tokens than are known, the last slice is too short to be equal
            tokens[: min(EDGE, known)].tobytes() == self._head
            and tokens[max(known - EDGE, 0) : known].tobytes() == self._tail
        )

    def extend(self, tokens: Int32Array) -> None:
        """Takes in the tokens behind those it knows; `tokens` are all of them. O(new tokens, or `window` if less)."""
        end = len(tokens) - 1  # what ends at the last token was followed by nothing yet
        start = max(self._num_indexed, end - self._window)
        if end - start < MANY:
            self._add_few(tokens, start, end)
        else:
            self._add_many(tokens, start, end)
        self._num_indexed, self._num_known = max(end, 0), len(tokens)
        if len(self._head) < EDGE * tokens.itemsize:
            self._head = tokens[:EDGE].tobytes()
        self._tail = tokens[max(len(tokens) - EDGE, 0) :].tobytes()

    def _add_few(self, tokens: Int32Array, start: int, end: int) -> None:
        """Enters the n-grams that end behind `start`, up to `end`."""
        longest = self._lengths[-1]
        offset = max(start + 1 - longest, 0)
        values = tokens[offset:end].tolist() if start < end else []
        for position in range(start + 1, end + 1):
            place = position % self._window
            buckets = self._buckets(values[max(position - longest, 0) - offset : position - offset])
            for latest, earlier, bucket in zip(self._latest, self._earlier, buckets, strict=False):
                earlier[place] = latest[bucket]
                latest[bucket] = position

    def _add_many(self, tokens: Int32Array, start: int, end: int) -> None:
        """The same for many at once, at most `window`."""
        hashes = np.zeros(end - start, dtype=np.int64)
        for length in range(1, self._lengths[-1] + 1):
            first = max(start + 1, length)
            hashes = hashes[len(hashes) - (end + 1 - first) :]
            hashes = (hashes * _MULTIPLIER + tokens[first - length : end + 1 - length] + 1) % _PRIME
            if length >= self._lengths[0]:
                self._chain(length - self._lengths[0], hashes % self._window, np.arange(first, end + 1))

    def _chain(self, table: int, buckets: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        latest = np.frombuffer(self._latest[table], dtype=np.int32)
        earlier = np.frombuffer(self._earlier[table], dtype=np.int32)
        order = np.sort(buckets << 32 | np.arange(len(buckets))) & 0xFFFFFFFF  # by bucket, then by position
        buckets, ordered = buckets[order], positions[order]
        same = np.concatenate([[False], buckets[1:] == buckets[:-1]])
        earlier[ordered % self._window] = np.where(same, np.roll(ordered, 1), latest[buckets])
        latest[buckets] = ordered  # where a bucket is repeated, the last assignment stays

    def _buckets(self, values: list[int]) -> list[int]:
        """Of the n-grams that end with the last of `values`, the shortest first; of the lengths that `values` have."""
        hashed, buckets, shortest = 0, [], self._lengths[0]
        for length, value in enumerate(reversed(values), start=1):
            hashed = (hashed * _MULTIPLIER + value + 1) % _PRIME
            if length >= shortest:
                buckets.append(hashed % self._window)
        return buckets

    def occurrences(self, tokens: Int32Array) -> Iterator[int]:
        """Where else the last n-gram of `tokens` ended (the position behind it): the longest n first, then the latest.

        `tokens` are those last extended to. A position occurs once for each length that matches there.
        """
        known, floor = self._num_known, max(self._num_indexed - self._window, 0)
        values = tokens[max(known - self._lengths[-1], 0) :].tolist()
        found = list(enumerate(self._buckets(values)))
        for table, bucket in reversed(found):
            length = self._lengths[table]
            suffix = tokens[known - length :].tobytes()
            position, earlier = self._latest[table][bucket], self._earlier[table]
            for _ in range(MAX_WALK):
                if position <= floor:
                    break
                if tokens[position - length : position].tobytes() == suffix:
                    yield position
                position = earlier[position % self._window]

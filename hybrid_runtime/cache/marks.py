"""Fingerprints of prefixes, by which those of evicted states are recognised.

A mark stands for all tokens up to a multiple of `MARK_INTERVAL`: the sum of the tokens times random weights of their
places, modulo 2^64, so that the marks of all prefixes of a prompt come from one pass. Two prefixes may share one; what
is concluded from a mark must allow that.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.cache.node import Node, TokenArray

MARK_INTERVAL = 64
"""In tokens."""


def marked_length(length: int) -> int:
    """The length of the longest prefix with a mark that `length` tokens have."""
    return length - length % MARK_INTERVAL


def marks_of(tokens: TokenArray, start: int = 0, before: int = 0) -> list[int]:
    """The marks of all prefixes that end within `tokens` (int32 `[L]`), the shortest first.

    `start` tokens precede them, a multiple of `MARK_INTERVAL`, whose mark is `before`.
    """
    tokens = tokens[: marked_length(len(tokens))]
    end = start + len(tokens)
    # Inverted, token 0 counts, too. The product of 32 and 64 bits needs no wider copy of the tokens.
    terms = ~tokens * _weights(1 << end.bit_length())[start:end]
    terms[:1] += before
    return np.add.accumulate(terms)[MARK_INTERVAL - 1 :: MARK_INTERVAL].tolist()


@cache
def _weights(size: int) -> NDArray[np.int64]:
    """int64 `[size]`, random and the same in every call. Each size is the start of the larger ones."""
    return np.random.PCG64(0).random_raw(size).view(np.int64)


def mark_of(node: Node) -> int:
    """The mark of the longest marked prefix that ends at `node` or above it; 0 if that is none.

    It stays on the node. O(tokens and nodes down from the nearest node that has its own).
    """
    if node.mark is None:
        above = node
        while above.mark is None:
            assert above.parent is not None, "the root has its mark from the start"
            above = above.parent
        marks_between(above, node)
    assert node.mark is not None
    return node.mark


def marks_between(above: Node, node: Node) -> list[int]:
    """The marks of the prefixes of `node` that are longer than its ancestor `above`, the shortest first."""
    before = mark_of(above)
    if marked_length(above.length) == marked_length(node.length):
        node.mark = before
        return []
    marks = marks_of(tokens_since_mark(above.length, node), marked_length(above.length), before)
    node.mark = marks[-1]
    return marks


def tokens_since_mark(length: int, node: Node) -> TokenArray:
    """The tokens up to `node` from the last multiple of `MARK_INTERVAL` in `length <= node.length` on, int32."""
    start = marked_length(length)
    keys: list[bytes] = []
    while node.length > start:
        assert node.parent is not None
        keys.append(node.key_bytes)
        node = node.parent
    keys.reverse()
    return np.frombuffer(b"".join(keys), dtype=np.int32)[start - node.length :]

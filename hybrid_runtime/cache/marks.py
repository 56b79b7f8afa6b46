"""Fingerprints of prefixes, by which those of evicted states are recognised.

A mark stands for all tokens up to a multiple of `MARK_INTERVAL`: a chain of Python's own hashes, each of the mark
before and the tokens since, so that the marks of all prefixes of a prompt come from one pass. That takes no longer than
sums in NumPy of tokens times weights, which read and write far more memory. The hashes differ between processes, so
that nobody can prepare prompts whose marks meet. Two prefixes may still share one; what is concluded from a mark must
allow that.
"""

from __future__ import annotations

import numpy as np

from hybrid_runtime.cache.node import Node

MARK_INTERVAL = 64
"""In tokens."""
_TOKEN_BYTES = np.dtype(np.int32).itemsize


def marked_length(length: int) -> int:
    """The length of the longest prefix with a mark that `length` tokens have."""
    return length - length % MARK_INTERVAL


def marks_of(tokens: bytes, before: int = 0) -> list[int]:
    """The marks of all prefixes that end within `tokens` (int32 in native order), the shortest first.

    `before` is the mark of what precedes them, a multiple of `MARK_INTERVAL`.
    """
    size = MARK_INTERVAL * _TOKEN_BYTES
    marks: list[int] = []
    for end in range(size, len(tokens) + 1, size):
        before = hash((before, tokens[end - size : end]))
        marks.append(before)
    return marks


def mark_of(node: Node) -> int:
    """The mark of the longest marked prefix that ends at `node` or above it; 0 if that is none.

    It stays on the node and on those above that had none. O(tokens and nodes since the nearest that has its own).
    """
    unmarked: list[Node] = []
    above = node
    while above.mark is None:
        assert above.parent is not None, "the root has its mark from the start"
        unmarked.append(above)
        above = above.parent
    for lower in reversed(unmarked):
        marks_between(above, lower)
        above = lower
    assert node.mark is not None
    return node.mark


def marks_between(above: Node, node: Node) -> list[int]:
    """The marks of the prefixes of `node` that are longer than its ancestor `above`, the shortest first."""
    before = mark_of(above)
    if marked_length(above.length) == marked_length(node.length):
        node.mark = before
        return []
    marks = marks_of(tokens_since_mark(above.length, node), before)
    node.mark = marks[-1]
    return marks


def tokens_since_mark(length: int, node: Node) -> bytes:
    """The tokens up to `node` from the last multiple of `MARK_INTERVAL` in `length <= node.length` on, as bytes."""
    start = marked_length(length)
    keys: list[bytes] = []
    while node.length > start:
        assert node.parent is not None
        keys.append(node.key_bytes)
        node = node.parent
    keys.reverse()
    return b"".join(keys)[(start - node.length) * _TOKEN_BYTES :]

"""Drafts without weights: what followed the last tokens when they last occurred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from hybrid_runtime.speculative.draft import Draft, DraftRow, Int32Array
from hybrid_runtime.speculative.ngram_index import NgramIndex

DEFAULT_WINDOW = 32768  # tokens: 256 KiB per request and length of n-gram
MAX_OCCURRENCES = 16
"""Looked at for the branches of one tree: they may all go on in the same way."""


class NgramDrafter:
    """Looks the last tokens of a request up in its own prompt and output, and drafts what followed them there.

    The longest n-gram from `max_ngram` down to `min_ngram` tokens counts, and its latest occurrence (prompt lookup:
    Saxena 2023; vLLM's method "ngram"). Where what followed runs into the end of the tokens, it goes on with what was
    drafted, so that a period shorter than the draft is repeated. With `topk` above 1 the other occurrences, then
    those of shorter n-grams, add up to `topk` different continuations of `num_steps` tokens to one tree, at most
    `num_nodes` nodes: the first continuation gets all its nodes before the second gets any.

    Every request row has an index of its own, which costs O(new tokens) per call. It is built anew when the row's
    tokens do not go on from those seen before: another request has the row, or they were cut. Whatever the index
    says, only tokens of the row itself are drafted.
    """

    def __init__(
        self,
        *,
        min_ngram: int = 2,
        max_ngram: int = 4,
        topk: int = 1,
        num_steps: int = 3,
        num_nodes: int | None = None,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        """`num_nodes` is without the root; None: no limit but the rows' own. Raises ValueError for what cannot be."""
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram} must be 1 or more and in order")
        for name, value in (("topk", topk), ("num_steps", num_steps), ("window", window)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._ngram = min_ngram, max_ngram
        self._topk, self._num_steps, self._window = topk, num_steps, window
        self._num_nodes = topk * num_steps if num_nodes is None else num_nodes
        self._indices: dict[int, NgramIndex] = {}

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """One draft per row; an empty one where the last tokens are new. A row that may not draft is not looked at."""
        return [self._draft(row) for row in rows]

    def forget(self, row: int) -> None:
        """Drops the index of a request row that no request has any more."""
        self._indices.pop(row, None)

    def _draft(self, row: DraftRow) -> Draft:
        num_nodes = min(row.max_nodes, self._num_nodes)
        if num_nodes <= 0:
            return Draft.chain([])
        index = self._indices.get(row.row)
        if index is None or not index.precedes(row.tokens):
            index = self._indices[row.row] = NgramIndex(*self._ngram, self._window)
        index.extend(row.tokens)
        if self._topk == 1:
            path = next(self._continuations(row.tokens, index), [])
            return Draft.chain(path[:num_nodes])
        return _merge(self._continuations(row.tokens, index), num_nodes, self._topk)

    def _continuations(self, tokens: Int32Array, index: NgramIndex) -> Iterator[list[int]]:
        """What followed each occurrence, `num_steps` tokens; one may come twice."""
        for position in islice(index.occurrences(tokens), MAX_OCCURRENCES):
            path = tokens[position : position + self._num_steps].tolist()
            period = len(tokens) - position
            while len(path) < self._num_steps:
                path.append(path[-period])
            yield path


def _merge(paths: Iterator[list[int]], num_nodes: int, topk: int) -> Draft:
    """One tree of the first `topk` different paths, whose shared beginnings are the same nodes; at most `num_nodes`."""
    nodes: dict[tuple[int, int], int] = {}  # by parent and token
    different: set[tuple[int, ...]] = set()
    for path in paths:
        different.add(tuple(path))
        node = 0
        for token in path:
            if (node, token) not in nodes and len(nodes) == num_nodes:
                break
            node = nodes.setdefault((node, token), len(nodes) + 1)
        if len(different) == topk or len(nodes) == num_nodes:
            break
    return Draft(
        np.array([token for _, token in nodes], dtype=np.int32),
        np.array([parent for parent, _ in nodes], dtype=np.int32),
    )

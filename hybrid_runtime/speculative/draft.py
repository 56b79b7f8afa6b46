"""What a drafter is asked and what it answers, and the check of an answer.

The nodes of a draft tree are numbered from the root, node 0: the request's last token, which is sampled and neither in
KV nor in a state yet. Entry i of a draft is node i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, eq=False)
class Draft:
    """The drafted nodes of one request: int32 `[n]` each, n may be 0.

    `parents[i]` is the node that entry i follows: 0 for the root, at most i. So an entry comes after its parent, and
    the first m entries of a draft are a draft too.
    """

    token_ids: Int32Array
    parents: Int32Array

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def chain(cls, token_ids: Sequence[int] | Int32Array) -> Draft:
        """Each token follows the one before; the first follows the root."""
        return cls(np.array(token_ids, dtype=np.int32), np.arange(len(token_ids), dtype=np.int32))


@dataclass(frozen=True, eq=False)
class DraftRow:
    """A request that may draft.

    Fields:
    row: of the request table; another request may have it later
    tokens: prompt and output, int32 `[L]`, L >= 1; the last one is the root. A drafter does not write to it, and keeps
        no reference: the buffer behind it goes on growing
    max_nodes: drafted nodes that are allowed, >= 0
    """

    row: int
    tokens: Int32Array
    max_nodes: int


class Drafter(Protocol):
    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """One draft per row, in order; an empty one where there is nothing to propose."""
        ...


def check_drafts(
    drafts: Sequence[Draft], rows: Sequence[DraftRow], *, vocab_size: int, drafter: str = "the drafter"
) -> None:
    """Raises ValueError, which says what `drafter` did wrong, unless there is one right draft per row."""
    if len(drafts) != len(rows):
        raise ValueError(f"{drafter} returned {len(drafts)} drafts for {len(rows)} rows")
    for draft, row in zip(drafts, rows, strict=True):
        check_draft(draft, row, vocab_size=vocab_size, drafter=drafter)


def check_draft(draft: Draft, row: DraftRow, *, vocab_size: int, drafter: str = "the drafter") -> None:
    """Raises ValueError, which says what `drafter` did wrong, unless `draft` is a tree that `row` allows."""
    where = f"{drafter} returned for row {row.row}"
    if not isinstance(draft, Draft):
        raise ValueError(f"{where} {draft!r}, which is no Draft")
    for name in ("token_ids", "parents"):
        array = getattr(draft, name)
        if not isinstance(array, np.ndarray) or array.dtype != _INT32 or array.ndim != 1:
            raise ValueError(f"{where} {name} that are no int32 vector: {array!r}")
    token_ids, parents = draft.token_ids, draft.parents
    if len(token_ids) != len(parents):
        raise ValueError(f"{where} {len(token_ids)} token ids and {len(parents)} parents")
    if len(token_ids) > row.max_nodes:
        raise ValueError(f"{where} {len(token_ids)} nodes where {row.max_nodes} are allowed")
    wrong = np.flatnonzero((parents < 0) | (parents > np.arange(len(parents))))
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"{where} node {i + 1} with parent {parents[i]}, which must be one of the nodes 0..{i}")
    wrong = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"{where} node {i + 1} with token id {token_ids[i]}, which must be one of 0..{vocab_size - 1}")

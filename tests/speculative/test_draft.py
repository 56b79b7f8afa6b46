"""What the check of a drafter's answer finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybrid_runtime.speculative.draft import Draft, DraftRow, check_draft, check_drafts

ROW = DraftRow(row=3, tokens=np.array([1, 2], dtype=np.int32), max_nodes=3)


def draft_of(token_ids: Any, parents: Any, dtype: Any = np.int32) -> Draft:
    return Draft(np.array(token_ids, dtype=dtype), np.array(parents, dtype=np.int32))


@pytest.mark.parametrize(
    "draft",
    [
        Draft.chain([]),
        Draft.chain([7, 0, 7]),
        draft_of([1, 2, 3], [0, 0, 0]),
        draft_of([1, 2, 3], [0, 1, 1]),
        draft_of([1, 2, 9], [0, 0, 2]),
    ],
)
def test_a_tree_passes(draft):
    check_draft(draft, ROW, vocab_size=10)


def test_a_chain_follows_the_root():
    assert Draft.chain([5, 6, 7]).parents.tolist() == [0, 1, 2]
    assert Draft.chain([5, 6, 7]).token_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("draft", "complaint"),
    [
        (None, "None, which is no Draft"),
        (draft_of([1, 2], [0, 1], dtype=np.int64), "token_ids that are no int32 vector"),
        (draft_of([[1, 2]], [0, 1]), "token_ids that are no int32 vector"),
        (draft_of([1, 2], [[0, 1]]), "parents that are no int32 vector"),
        (draft_of([1, 2], [0]), "2 token ids and 1 parents"),
        (Draft.chain([1, 2, 3, 4]), "4 nodes where 3 are allowed"),
        (draft_of([1, 2], [0, 2]), "node 2 with parent 2, which must be one of the nodes 0..1"),
        (draft_of([1, 2], [1, 0]), "node 1 with parent 1, which must be one of the nodes 0..0"),
        (draft_of([1, 2], [0, -1]), "node 2 with parent -1"),
        (draft_of([1, 10], [0, 1]), "node 2 with token id 10, which must be one of 0..9"),
        (draft_of([-1, 1], [0, 1]), "node 1 with token id -1"),
    ],
)
def test_what_a_drafter_did_wrong_is_named(draft, complaint):
    with pytest.raises(ValueError, match="the Markov drafter returned for row 3 ") as error:
        check_draft(draft, ROW, vocab_size=10, drafter="the Markov drafter")
    assert complaint in str(error.value)


def test_every_row_has_its_draft():
    check_drafts([Draft.chain([1]), Draft.chain([])], [ROW, ROW], vocab_size=10)
    with pytest.raises(ValueError, match="the drafter returned 1 drafts for 2 rows"):
        check_drafts([Draft.chain([1])], [ROW, ROW], vocab_size=10)
    with pytest.raises(ValueError, match="token id 10"):
        check_drafts([Draft.chain([1]), Draft.chain([10])], [ROW, ROW], vocab_size=10)

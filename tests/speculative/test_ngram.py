"""NgramDrafter against a search through all tokens, over requests that grow, are cut, end, and hand on their rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hybrid_runtime.speculative import ngram_index
from hybrid_runtime.speculative.draft import Draft, DraftRow, check_draft
from hybrid_runtime.speculative.ngram import MAX_OCCURRENCES, NgramDrafter

VOCAB_SIZE = 1000


def draft_row(tokens: Sequence[int], max_nodes: int = 64, row: int = 1) -> DraftRow:
    return DraftRow(row, np.array(tokens, dtype=np.int32), max_nodes)


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, in the order of the nodes."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def naive_paths(
    tokens: list[int], *, min_ngram: int, max_ngram: int, topk: int, num_steps: int, max_nodes: int, window: int
) -> list[tuple[int, ...]]:
    """What `paths_of` the draft has to be: every place is compared with the last tokens."""
    places = []
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :] and end > len(tokens) - 1 - window:
                places.append(end)
    paths: dict[tuple[int, ...], None] = {}
    followed: list[tuple[int, ...]] = []
    for end in places[:MAX_OCCURRENCES]:
        longer = list(tokens)
        for step in range(num_steps):
            longer.append(longer[end + step])
        path = tuple(longer[len(tokens) :])
        if path not in followed and len(followed) < topk:
            followed.append(path)
            paths.update(dict.fromkeys(path[:depth] for depth in range(1, num_steps + 1)))
    return list(paths)[:max_nodes]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_drafts_are_those_of_a_search(data):
    """The tokens come in pieces, of which the index takes in some one by one and some at once."""
    min_ngram = data.draw(st.integers(1, 3))
    options = {
        "min_ngram": min_ngram,
        "max_ngram": data.draw(st.integers(min_ngram, 4)),
        "topk": data.draw(st.integers(1, 4)),
        "num_steps": data.draw(st.integers(1, 5)),
        "window": data.draw(st.sampled_from([1, 2, 7, 50, 4096])),
    }
    drafter = NgramDrafter(**options)
    letters = data.draw(st.integers(1, 4))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    few, many = st.integers(1, 5), st.integers(ngram_index.MANY, 3 * ngram_index.MANY)
    tokens: list[int] = []
    for size in data.draw(st.lists(few | many, min_size=1, max_size=5)):
        tokens += generator.integers(0, letters, size).tolist()
        max_nodes = data.draw(st.integers(0, 20))
        row = draft_row(tokens, max_nodes)
        (draft,) = drafter.draft([row])
        check_draft(draft, row, vocab_size=VOCAB_SIZE)
        assert paths_of(draft) == naive_paths(tokens, max_nodes=max_nodes, **options)


class Rows(RuleBasedStateMachine):
    """Requests in two rows of one table; nothing but the tokens tells the drafter what became of them."""

    @initialize(topk=st.integers(1, 2))
    def start(self, topk):
        self.options = {"min_ngram": 1, "max_ngram": 3, "topk": topk, "num_steps": 3, "window": 4096}
        self.drafter = NgramDrafter(**self.options)
        self.tokens: dict[int, list[int]] = {1: [0], 2: [1]}

    rows = st.integers(1, 2)
    letters = st.lists(st.integers(0, 2), min_size=1, max_size=40)

    @rule(row=rows, new=letters)
    def grow(self, row, new):
        if len(self.tokens[row]) + len(new) < ngram_index.EDGE:  # so that the whole is compared
            self.tokens[row] += new

    @rule(row=rows, new=letters)
    def another_request_has_the_row(self, row, new):
        self.tokens[row] = new

    @rule(row=rows, length=st.integers(1, 40), new=letters)
    def cut_and_go_on(self, row, length, new):
        self.tokens[row] = (self.tokens[row][:length] + new)[: ngram_index.EDGE - 1]

    @rule()
    def swap(self):
        self.tokens[1], self.tokens[2] = self.tokens[2], self.tokens[1]

    @rule(row=rows)
    def forget(self, row):
        self.drafter.forget(row)

    @rule(rows=st.lists(rows, max_size=3))
    def draft(self, rows):
        drafts = self.drafter.draft([draft_row(self.tokens[row], 9, row) for row in rows])
        for row, draft in zip(rows, drafts, strict=True):
            assert paths_of(draft) == naive_paths(self.tokens[row], max_nodes=9, **self.options)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_longest_ngram_counts_then_the_latest():
    drafter = NgramDrafter(min_ngram=1, max_ngram=3, num_steps=2)
    long, late, last = [1, 2, 3, 10, 11], [2, 3, 20, 21], [1, 2, 3]
    assert paths_of(drafter.draft([draft_row(long + late + last)])[0]) == [(10,), (10, 11)]
    assert paths_of(drafter.draft([draft_row([*late, 5, 3, 30, 31, 9, 2, 3])])[0]) == [(20,), (20, 21)]
    assert paths_of(drafter.draft([draft_row([*late, 5, 2, 3, 40, 41, 2, 3])])[0]) == [(40,), (40, 41)]


def test_a_period_shorter_than_the_draft_is_repeated():
    (draft,) = NgramDrafter(num_steps=5).draft([draft_row([7, 1, 2, 1, 2, 1])])
    assert draft.token_ids.tolist() == [2, 1, 2, 1, 2]


def test_continuations_share_their_beginnings_and_the_latest_comes_first():
    tokens = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 9, 1, 2]
    (draft,) = NgramDrafter(topk=3, num_steps=2).draft([draft_row(tokens)])
    assert draft.token_ids.tolist() == [8, 9, 5, 7, 6]
    assert draft.parents.tolist() == [0, 1, 0, 3, 3]


@pytest.mark.parametrize("tokens", [[4], [4, 4], [4, 5, 6, 7, 8], list(range(100))])
def test_nothing_is_drafted_where_nothing_occurred_before(tokens):
    assert len(NgramDrafter(min_ngram=2).draft([draft_row(tokens)])[0]) == 0


@pytest.mark.parametrize("shared_end", ["head", "tail"])
def test_another_request_is_told_by_either_end(shared_end):
    """It has the row, and its first or its last tokens are those of the request before."""
    shared, own, other = list(range(200)), list(range(300, 330)), list(range(400, 430))
    drafter = NgramDrafter()
    drafter.draft([draft_row(other + shared if shared_end == "tail" else shared + other)])
    tokens = own + shared if shared_end == "tail" else shared + own
    assert paths_of(drafter.draft([draft_row([*tokens, 310, 311])])[0]) == [(312,), (312, 313), (312, 313, 314)]


def test_an_index_of_other_tokens_with_the_same_ends_draws_nothing_false():
    """The comparison cannot see that the middle is another request's; what it says is looked up in the row's own."""
    edge = list(range(ngram_index.EDGE))
    first, second = list(range(200, 300)), list(range(300, 400))
    drafter = NgramDrafter()
    drafter.draft([draft_row(edge + first + edge)])
    tokens = edge + second + edge
    assert paths_of(drafter.draft([draft_row([*tokens, 210, 211])])[0]) == []
    assert paths_of(drafter.draft([draft_row([*tokens, 210, 211, 40, 41])])[0]) == [(42,), (42, 43), (42, 43, 44)]


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="min_ngram=3, max_ngram=2"):
        NgramDrafter(min_ngram=3, max_ngram=2)
    for name in ("topk", "num_steps", "window"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            NgramDrafter(**{name: 0})


def least_seconds_per_token(drafter: NgramDrafter, tokens: np.ndarray, start: int) -> float:
    """Of drafting once after each token behind `start`, in the quickest of several tries of 50."""
    drafter.draft([DraftRow(1, tokens[:start], 8)])
    least = float("inf")
    for first in range(start, len(tokens) - 50, 50):
        before = time.perf_counter()
        for length in range(first, first + 50):
            drafter.draft([DraftRow(1, tokens[: length + 1], 8)])
        least = min(least, (time.perf_counter() - before) / 50)
    return least


def test_the_cost_of_a_call_does_not_grow_with_the_request():
    tokens = np.arange(65_000, dtype=np.int32)
    short, long = (least_seconds_per_token(NgramDrafter(), tokens[: size + 1000], size) for size in (4000, 64_000))
    assert long < 2 * short

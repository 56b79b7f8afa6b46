"""The memory of evicted prefixes against a list of token tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.cache import marks
from hybrid_runtime.cache.ghosts import GhostIndex
from hybrid_runtime.cache.marks import MARK_INTERVAL
from hybrid_runtime.cache.node import Node
from hybrid_runtime.memory.slots import no_slots

prefixes = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)


def as_tokens(tokens: tuple[int, ...] | list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def node_of(tokens: np.ndarray, cuts: tuple[int, ...] = ()) -> Node:
    """A node at the end of `tokens`, below others at the cuts."""
    node = Node(None, as_tokens([]), no_slots())
    for end in (*cuts, len(tokens)):
        key = tokens[node.length : end]
        node = Node(node, key, key)
    return node


@given(
    capacity=st.integers(1, 5),
    calls=st.lists(st.tuples(st.sampled_from(["remember", "longest", "clear"]), prefixes), max_size=40),
)
def test_it_knows_the_latest_and_forgets_the_oldest(capacity: int, calls: list[tuple[str, tuple[int, ...]]]) -> None:
    index = GhostIndex(capacity)
    model: list[tuple[int, ...]] = []  # the oldest first
    for call, tokens in calls:
        if call == "remember":
            index.remember(node_of(as_tokens(tokens)))
            model = [*(member for member in model if member != tokens), tokens][-capacity:]
        elif call == "clear" and len(model) == capacity:
            index.clear()
            model = []
        else:
            known = [len(member) for member in model if tokens[: len(member)] == member]
            assert index.longest(as_tokens(tokens)) == max(known, default=0)
        assert len(index) == len(model)


@pytest.mark.parametrize("cuts", [(), (1,), (100, 3000), (MARK_INTERVAL,), (4095,), tuple(range(1, 4096, 7))])
def test_lengths_of_a_long_prompt_on_any_path(cuts: tuple[int, ...]) -> None:
    """A prefix has the same name however the tree has cut it up, and whatever was remembered before it."""
    tokens = np.random.default_rng(3).integers(0, 2**31 - 1, size=5000).astype(np.int32)
    index = GhostIndex()
    lengths = (1, 3, 7, MARK_INTERVAL - 1, MARK_INTERVAL, MARK_INTERVAL + 1, 4095, 4096, 4999)
    for length in lengths:
        index.remember(node_of(tokens[:length], tuple(cut for cut in cuts if cut < length)))
    for length in lengths:
        assert index.longest(tokens[:length]) == length
        changed = tokens.copy()
        changed[length - 1] ^= 1
        assert index.longest(changed) == max((shorter for shorter in lengths if shorter < length), default=0)
    assert index.longest(tokens) == 4999
    assert index.longest(tokens[:4998]) == 4096


@pytest.mark.parametrize(
    ("remembered", "asked"),
    [
        ([0] * 128, [0] * 127),
        ([0] * 65, [0] * 64),
        ([0, 0], [0]),
        ([0], [1]),
        ([1, 2], [2, 1]),
        ([0, 1], [1, 0]),
        ([2**31 - 1], [0]),
        ([5, 6], [6, 5, 5]),
    ],
)
def test_other_tokens_are_not_known(remembered: list[int], asked: list[int]) -> None:
    index = GhostIndex()
    index.remember(node_of(as_tokens(remembered)))
    assert index.longest(as_tokens(asked)) == 0
    assert index.longest(as_tokens([])) == 0


def test_names_hardly_ever_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prefixes of 2,000 random prompts of few letters are told apart, by marks at every second token."""
    monkeypatch.setattr(marks, "MARK_INTERVAL", 2)
    rng = np.random.default_rng(4)
    index, seen = GhostIndex(capacity=10**6), set()
    for _ in range(2000):
        tokens = rng.integers(0, 2, size=int(rng.integers(1, 16))).astype(np.int32)
        assert index.longest(tokens) == max(
            (n for n in range(1, len(tokens) + 1) if tuple(tokens[:n].tolist()) in seen), default=0
        )
        index.remember(node_of(tokens))
        seen.add(tuple(tokens.tolist()))
    assert len(index) == len(seen)


def test_what_is_evicted_again_is_among_the_latest() -> None:
    index = GhostIndex(capacity=2)
    for token in (1, 2, 1, 3):
        index.remember(node_of(as_tokens([token])))
    assert [index.longest(as_tokens([token])) for token in (1, 2, 3)] == [1, 0, 1]

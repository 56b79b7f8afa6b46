"""The memory of evicted prefixes against a list of token tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.cache.ghosts import GhostIndex

prefixes = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)


def as_tokens(tokens: tuple[int, ...] | list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@given(
    capacity=st.integers(1, 5),
    calls=st.lists(st.tuples(st.sampled_from(["remember", "longest", "clear"]), prefixes), max_size=40),
)
def test_it_knows_the_latest_and_forgets_the_oldest(capacity: int, calls: list[tuple[str, tuple[int, ...]]]) -> None:
    index = GhostIndex(capacity)
    model: list[tuple[int, ...]] = []  # the oldest first
    for call, tokens in calls:
        if call == "remember":
            index.remember(as_tokens(tokens))
            model = [*(member for member in model if member != tokens), tokens][-capacity:]
        elif call == "clear" and len(model) == capacity:
            index.clear()
            model = []
        else:
            known = [len(member) for member in model if tokens[: len(member)] == member]
            assert index.longest(as_tokens(tokens)) == max(known, default=0)
        assert len(index) == len(model)


def test_a_long_prompt_after_a_short_one() -> None:
    """The fingerprint of a prefix is the same whatever it was computed along with."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 2**31 - 1, size=5000).astype(np.int32)
    index = GhostIndex()
    for length in (1, 3, 4096, 7, 4999):
        index.remember(tokens[:length])
    assert index.longest(tokens) == 4999
    assert index.longest(tokens[:4998]) == 4096
    assert index.longest(tokens[:2]) == 1
    changed = tokens.copy()
    changed[6] ^= 1
    assert index.longest(changed) == 3


@pytest.mark.parametrize(
    ("remembered", "asked"),
    [([0, 0], [0]), ([0], [1]), ([1, 2], [2, 1]), ([0, 1], [1, 0]), ([2**31 - 1], [0]), ([5, 6], [6, 5, 5])],
)
def test_other_tokens_are_not_known(remembered: list[int], asked: list[int]) -> None:
    index = GhostIndex()
    index.remember(as_tokens(remembered))
    assert index.longest(as_tokens(asked)) == 0
    assert index.longest(as_tokens([])) == 0


def test_fingerprints_hardly_ever_meet() -> None:
    """All prefixes of 2,000 random prompts of few letters are told apart."""
    rng = np.random.default_rng(4)
    index, seen = GhostIndex(capacity=10**6), set()
    for _ in range(2000):
        tokens = rng.integers(0, 2, size=int(rng.integers(1, 16))).astype(np.int32)
        assert index.longest(tokens) == max(
            (n for n in range(1, len(tokens) + 1) if tuple(tokens[:n].tolist()) in seen), default=0
        )
        index.remember(tokens)
        seen.add(tuple(tokens.tolist()))
    assert len(index) == len(seen)

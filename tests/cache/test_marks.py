"""Marks against hashes of whole prefixes, on trees that are split."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hybrid_runtime.cache import marks
from hybrid_runtime.cache.ghosts import GhostIndex
from hybrid_runtime.cache.marks import MARK_INTERVAL, mark_of, marks_between, marks_of, tokens_since_mark
from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.radix_cache import RadixCache
from tests.cache.helpers import POLICIES, checkpoint, ints, prefix_of


def random_cache(seed: int) -> RadixCache:
    """Forty sequences over two tokens, which share much."""
    rng, cache, slot = random.Random(seed), RadixCache(), 1
    for _ in range(40):
        tokens = rng.choices([0, 1], k=rng.randint(1, 30))
        cache.insert(ints(tokens), ints(range(slot, slot + len(tokens))), [checkpoint(len(tokens), slot)])
        if rng.random() < 0.5:
            mark_of(rng.choice(list(cache.nodes())))  # those that are split later have a mark, or not
        slot += len(tokens)
    return cache


@pytest.fixture(params=[1, 3, 8])
def interval(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(marks, "MARK_INTERVAL", request.param)
    return request.param


@pytest.mark.parametrize("seed", range(3))
def test_marks_are_those_of_the_whole_prefix(interval: int, seed: int) -> None:
    cache = random_cache(seed)
    prefixes: dict[int, tuple[int, ...]] = {0: ()}
    for node in cache.nodes():
        prefix = prefix_of(node)
        marked = len(prefix) // interval * interval
        whole = marks_of(ints(prefix).tobytes())
        assert mark_of(node) == [0, *whole][-1]
        assert prefixes.setdefault(mark_of(node), prefix[:marked]) == prefix[:marked], "two prefixes share a mark"
        assert tokens_since_mark(node.length, node) == ints(prefix[marked:]).tobytes()
        above: Node | None = node
        while above is not None:
            assert marks_between(above, node) == whole[above.length // interval :]
            rest = prefix[above.length // interval * interval :]
            assert tokens_since_mark(above.length, node) == ints(rest).tobytes()
            above = above.parent
    cache.check()
    assert len(prefixes) > 20


def test_a_mark_is_kept_and_those_below_start_from_it(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = random_cache(0)
    deepest = max(cache.nodes(), key=lambda node: node.length)
    above = deepest.parent
    assert above is not None
    expected = mark_of(above)
    assert marks_between(above, deepest), "the test needs a mark between the two"
    deepest.mark = None
    hashed: list[int] = []

    def count_and_hash(tokens: bytes, before: int) -> list[int]:
        hashed.append(len(tokens) // 4)
        return marks_of(tokens, before)

    monkeypatch.setattr(marks, "marks_of", count_and_hash)
    assert mark_of(deepest) == marks_of(ints(prefix_of(deepest)).tobytes())[-1] != expected
    assert mark_of(deepest) == deepest.mark
    assert hashed == [deepest.length - above.length // interval * interval]


def test_the_check_finds_a_wrong_mark() -> None:
    cache = random_cache(0)
    node = max(cache.nodes(), key=lambda node: node.length)
    node.mark = mark_of(node) + 1
    with pytest.raises(AssertionError, match="mark"):
        cache.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_hashed_once_and_only_where_something_was_evicted(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of a conversation, each with a state before its last token and one at its end, beside both memories."""
    num_hashed = 0

    def count_and_hash(tokens: bytes, before: int) -> list[int]:
        nonlocal num_hashed
        num_hashed += len(tokens) // 4
        return marks_of(tokens, before)

    monkeypatch.setattr(marks, "marks_of", count_and_hash)
    ghosts = GhostIndex()
    cache = RadixCache(policy, on_evict=ghosts.remember)
    tokens = np.arange(20 * 500, dtype=np.int32)
    for turn in range(1, 21):
        end = 500 * turn
        known = cache.match(tokens[:end]).kv_length
        states = [checkpoint(end - 1, 2 * turn), checkpoint(end, 2 * turn + 1)]
        cache.insert(tokens[:end], tokens[:end] + 1, states, protected_length=known)
        if turn == 10:
            assert num_hashed == 0
        if turn >= 10:
            cache.evict_state(2)
    cache.evict_state(40)
    assert len(ghosts) == 40
    assert len(tokens) - MARK_INTERVAL < num_hashed < len(tokens) + 40 * MARK_INTERVAL

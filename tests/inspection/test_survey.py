"""The picture holds the whole tree: shown, folded, or summed up; the most useful first; within its limits."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.inspection.picture import Picture, State, Totals
from hybrid_runtime.inspection.survey import Limits, take_picture
from tests.inspection.trees import Planter, big_planter, branches, counters, edges, random_planter

EVERYTHING = Limits(max_lines=10**6, max_depth=10**6)


def picture_of(cache: RadixCache, limits: Limits = EVERYTHING, now: float | None = None) -> Picture:
    return take_picture(
        cache,
        limits,
        label=lambda tokens: "".join(map(chr, tokens.tolist())),
        now=time.monotonic() if now is None else now,
    )


def num_lines(picture: Picture) -> int:
    """Lines that the picture takes when its folded parts are closed."""
    count, pending = 0, [picture.top]
    while pending:
        branch = pending.pop()
        is_partly_shown = bool(branch.children) or not branch.edges
        count += len(branch.edges) + (is_partly_shown and branch.left_out[0] > 0)
        pending += branch.children
    return count


limits = st.builds(
    Limits,
    max_lines=st.integers(1, 60),
    max_depth=st.integers(1, 8),
    max_folded=st.sampled_from([0, 3, 10**6]),
)


@given(seed=st.integers(0, 10**6), num_sequences=st.integers(0, 40), limits=limits)
def test_what_is_shown_and_what_is_left_out_add_up_to_the_trees_counters(seed, num_sequences, limits):
    cache = random_planter(seed, num_sequences).cache
    picture = picture_of(cache, limits)
    expected = counters(cache)
    own = [edge.own for edge in edges(picture)]
    absent = [branch.absent for branch in branches(picture)]
    assert picture.totals == expected
    assert Totals.sum([*own, *absent]) == expected
    for branch in (each for each in branches(picture) if each.edges):
        ending = [*(each.below for each in (*branch.children, *branch.folded)), branch.absent]
        sums = [edge.below for edge in branch.edges]
        for edge, beneath in zip(branch.edges, [*sums[1:], Totals.sum(ending)], strict=True):
            assert edge.below == Totals.sum([edge.own, beneath])


@given(seed=st.integers(0, 10**6), num_sequences=st.integers(0, 40), limits=limits)
def test_limits_are_kept(seed, num_sequences, limits):
    cache = random_planter(seed, num_sequences).cache
    picture = picture_of(cache, limits)
    assert num_lines(picture) <= limits.max_lines
    pending = list(picture.top.children)
    num_shown = 0
    while pending:
        branch = pending.pop()
        assert branch.depth < limits.max_depth
        num_shown += len(branch.edges)
        pending += branch.children
    assert len(edges(picture)) - num_shown <= limits.max_folded


@given(seed=st.integers(0, 10**6), num_sequences=st.integers(0, 40))
def test_what_just_fits_is_shown_whole(seed, num_sequences):
    cache = random_planter(seed, num_sequences).cache
    now = time.monotonic()
    whole = picture_of(cache, now=now)
    assert not any(branch.left_out[0] for branch in branches(whole))
    depth = max(branch.depth for branch in branches(whole))
    assert picture_of(cache, Limits(max(1, num_lines(whole)), max(1, depth + 1)), now) == whole
    if len(edges(whole)) > 1:
        smaller = picture_of(cache, Limits(num_lines(whole) - 1, depth + 1), now)
        assert any(branch.left_out[0] for branch in branches(smaller))


def test_an_edge_says_what_its_node_says():
    planter = Planter()
    planter.plant("abcdef", {2: "junction", 6: "tail"})
    node = planter.plant("abxy", {4: "final"})
    planter.hit(node, 2)
    planter.cache.lock(node)
    planter.cache.lock_kv(node)
    top = picture_of(planter.cache, now=node.last_used + 90).top
    (shared,) = top.children
    final, tail = shared.children
    assert [(e.start, e.length, e.text) for e in (*shared.edges, *final.edges, *tail.edges)] == [
        (0, 2, "ab"),
        (2, 4, "xy"),
        (2, 6, "cdef"),
    ]
    (edge,) = final.edges
    assert edge.state == State(slot=3, origin="final", num_locks=1)
    assert edge.num_kv_locks == 2
    assert edge.num_hits == 3
    assert edge.age == 90
    assert edge.own == edge.below == Totals(1, 2, 1, 3, 1, 2, 1)
    assert shared.edges[0].state == State(slot=1, origin="junction", num_locks=0)
    assert shared.below == Totals(3, 8, 3, 3, 2, 4, 1)
    assert (shared.depth, final.depth, tail.depth) == (0, 1, 1)


def test_edges_without_a_fork_between_them_are_one_branch():
    planter = Planter()
    planter.plant("abcdef", {1: "hint", 3: "tail", 6: "final"})
    (branch,) = picture_of(planter.cache).top.children
    assert [edge.text for edge in branch.edges] == ["a", "bc", "def"]
    assert branch.children == ()


def test_a_chain_of_tombstones_is_one_edge():
    planter = Planter()
    planter.plant("abcdef", {1: "hint", 3: "interval", 4: "interval", 6: "final"})
    planter.cache.evict_state(3)
    (branch,) = picture_of(planter.cache).top.children
    chain, end = branch.edges
    assert (chain.text, chain.num_nodes, chain.state, chain.own.num_tombstones) == ("abcd", 3, None, 3)
    assert (end.text, end.num_nodes) == ("ef", 1)


def test_tombstones_under_different_locks_stay_apart():
    planter = Planter()
    planter.plant("abcd", {1: "hint", 3: "interval", 4: "final"})
    upper = next(node for node in planter.cache.nodes() if node.length == 1)
    planter.cache.evict_state(2)
    planter.cache.lock_kv(upper)
    (branch,) = picture_of(planter.cache).top.children
    assert [(edge.text, edge.num_kv_locks) for edge in branch.edges] == [("a", 1), ("bc", 0), ("d", 0)]


def test_siblings_are_ordered_by_hits_then_recency_then_size():
    planter = Planter()
    nodes = {text: planter.plant(text) for text in ("often", "early", "late", "small", "biggest")}
    planter.hit(nodes["often"])
    for text, used in {"often": 0.0, "early": 1.0, "late": 3.0, "small": 2.0, "biggest": 2.0}.items():
        nodes[text].last_used = used
    order = [branch.edges[0].text for branch in picture_of(planter.cache).top.children]
    assert order == ["often", "late", "biggest", "small", "early"]


def test_a_branch_counts_with_all_that_is_below_it():
    planter = Planter()
    planter.plant("ab")
    planter.hit(planter.plant("cd"), 2)
    planter.plant("ce")
    planter.hit(planter.plant("abx"), 3)
    assert [branch.edges[0].text for branch in picture_of(planter.cache).top.children] == ["ab", "c"]


def test_the_lines_go_to_many_families_and_to_the_depth_of_the_best():
    planter = Planter()
    for family in range(20):
        for member in range(20):
            for twig in range(3):
                node = planter.plant([family, 99, member, 99, twig])
                planter.hit(node, int(family == 0))
    picture = picture_of(planter.cache, Limits(max_lines=40, max_depth=12))
    shown = [branch for branch in branches(picture) if branch.edges]
    assert sum(branch.depth == 0 for branch in shown) >= 8
    assert {branch.depth for branch in shown if branch.edges[0].start and branch.below.num_hits} == {1, 2}


def test_what_is_folded_is_the_rest_of_what_is_shown():
    cache = big_planter(300).cache
    limits = Limits(max_lines=30, max_depth=4, max_folded=10**6)
    picture = picture_of(cache, limits)
    assert sum(edge.num_nodes for edge in edges(picture)) == cache.num_nodes
    assert any(branch.folded for branch in branches(picture))
    without = picture_of(cache, Limits(limits.max_lines, limits.max_depth))
    assert num_lines(picture) == num_lines(without)


def test_an_empty_cache_gives_an_empty_picture():
    picture = picture_of(Planter().cache)
    assert picture.totals == Totals()
    assert picture.top.children == ()
    assert picture.max_length == 0


@functools.cache
def chain(num_nodes: int) -> RadixCache:
    planter = Planter()
    planter.plant([5] * num_nodes, dict.fromkeys(range(1, num_nodes + 1), "track"))
    return planter.cache


@functools.cache
def caterpillar(num_nodes: int) -> RadixCache:
    """A fork after every token of half as many."""
    planter = Planter()
    planter.plant([5] * (num_nodes // 2))
    for length in range(num_nodes // 2):
        planter.plant([5] * length + [6])
    return planter.cache


@functools.cache
def conversations(num_nodes: int) -> RadixCache:
    return big_planter(num_nodes).cache


@functools.cache
def star(num_nodes: int) -> RadixCache:
    planter = Planter()
    for token in range(num_nodes):
        planter.plant([token])
    return planter.cache


@pytest.mark.parametrize("build", [chain, caterpillar])
@pytest.mark.parametrize("limits", [EVERYTHING, Limits(50, 12), Limits(50, 12, 10**6)])
def test_a_deep_tree_is_no_deep_picture(build: Callable[[int], RadixCache], limits: Limits):
    cache = build(3 * sys.getrecursionlimit())
    picture = picture_of(cache, limits)
    assert picture.totals == counters(cache)
    assert max(branch.depth for branch in branches(picture)) < 100
    assert Totals.sum([*(e.own for e in edges(picture)), *(b.absent for b in branches(picture))]) == picture.totals


@pytest.mark.parametrize("build", [chain, star, conversations])
@pytest.mark.parametrize("limits", [Limits(100, 12), Limits(100, 12, 10**6)], ids=["text", "page"])
def test_the_cost_grows_like_the_tree(build: Callable[[int], RadixCache], limits: Limits):
    def cost(cache: RadixCache) -> float:
        times = []
        for _ in range(2):
            start = time.process_time()
            picture_of(cache, limits)
            times.append(time.process_time() - start)
        return min(times)

    assert cost(build(4000)) < 24 * cost(build(500))  # 64 times as high if it were quadratic

"""Trees, paths and committed writes against walks in Python."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.ops.draft_tree import along_path, strict_ancestors, write_committed
from tests.ops.tree_cases import LARGE_SHAPES, Parents, build_tree, large_parents, path_to, path_to_ends, same_bits
from tests.ops.tree_cases import small_parents as parents_of_rows

large = st.sampled_from(LARGE_SHAPES).flatmap(
    lambda shape: st.builds(large_parents, st.just(shape), num_nodes=st.integers(1, 64))
)


@given(parents_of_rows() | large)
def test_a_tree_knows_depths_and_ancestors(parents: list[Parents]):
    tree = build_tree(parents)
    assert tree.parents_BT.tolist() == parents
    for row, own in enumerate(parents):
        for node in range(len(own)):
            path = path_to(own, node)
            assert tree.depths_BT[row, node] == len(path) - 1
            assert tree.ancestors_BTT[row, node].nonzero().flatten().tolist() == path
            assert strict_ancestors(tree)[row, node].nonzero().flatten().tolist() == path[:-1]


@given(parents_of_rows(), st.data())
def test_the_entries_along_a_path(parents: list[Parents], data: st.DataObject):
    ends = [data.draw(st.none() | st.integers(0, len(own) - 1)) for own in parents]
    x_BTD = torch.randn(len(parents), len(parents[0]), 2)
    expected_BTD = torch.zeros_like(x_BTD)
    for row, end in enumerate(ends):
        path = [] if end is None else path_to(parents[row], end)
        expected_BTD[row, : len(path)] = x_BTD[row, path]
        x_BTD[row, [node for node in range(len(parents[row])) if node not in path]] = math.nan
    assert torch.equal(along_path(x_BTD, path_to_ends(parents, ends)), expected_BTD)


def test_committed_writes_leave_slot_0_and_rows_without_accepted_nodes_alone():
    pool = torch.randn(6, 3)
    pool[0] = -0.0
    before = pool.clone()
    values_BD = torch.full((5, 3), math.nan)
    values_BD[1] = 7.0
    path = path_to_ends([[0, 0]] * 5, [None, 1, 0, None, 0])
    write_committed(pool, torch.tensor([2, 4, 0, 0, 0]), values_BD, path)
    assert pool[4].tolist() == [7.0] * 3
    others = [0, 1, 2, 3, 5]
    assert same_bits(pool[others], before[others])
